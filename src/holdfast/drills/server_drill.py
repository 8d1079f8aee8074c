"""A drill of parameter servers: a run whose servers are killed one after another, and what its events prove.

There is no quiet run to compare with: what the weights are depends on the order of updates. What is checked is the
accounting of updates (server_promises.py). A server is killed only while every slice keeps a majority without it; the
primary of a slice first, of each slice in turn.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from holdfast.core.errors import HoldfastError
from holdfast.core.words import KEY_SERVERS, KEY_SLICE, Registration, decode_json
from holdfast.drills.plan import DrillPlan
from holdfast.drills.server_promises import check_served, unchecked
from holdfast.events.reading import read_events
from holdfast.log.configuration import Configuration
from holdfast.placement.directory import RunDirectory
from holdfast.placement.environment import LEDGER_SOCKET
from holdfast.placement.ledger import open_ledger
from holdfast.servers.log_codec import decode_configuration

NAME = "drill"
LOOK_S = 0.1
START_S_MAX = 180.0
JITTER = 0.3
END_S = 30.0


def conduct_servers(plan: DrillPlan, script: Sequence[str], report: Path | None) -> int:
    """The exit code: 0 if the promises held, 1 if one did not or nothing could be checked. `report`: for programs."""
    home = Path(tempfile.mkdtemp(prefix="holdfast-drill-"))
    drill = ServerDrill(plan, home)
    code = drill.go(script)
    verdicts = check_served(read_events(drill.directory.events), code)
    for verdict in verdicts:
        held = {True: "held", False: "BROKEN", None: "not judged"}[verdict.held]
        _say(f"{verdict.promise}: {held} ({verdict.text})")
    if drill.took_s:
        median = sorted(drill.took_s)[len(drill.took_s) // 2]
        _say(f"{len(drill.took_s)} servers killed; another primary after {median:.2f} s, the median")
    enough = bool(drill.took_s)
    if not enough:
        _say("faults: BROKEN (the script was over before the first fault)")
    if why := unchecked(verdicts):
        _say(f"nothing was checked: {why}")
    held_all = enough and not why and all(verdict.held is not False for verdict in verdicts)
    if report is not None:
        found = [{"promise": one.promise, "held": one.held, "text": one.text} for one in verdicts]
        report.write_text(json.dumps({"held": held_all, "verdicts": found, "failover_s": drill.took_s}, indent=2))
    if held_all:
        shutil.rmtree(home, ignore_errors=True)
    else:
        _say(f"the run is in {home}")
    return 0 if held_all else 1


class ServerDrill:
    def __init__(self, plan: DrillPlan, home: Path) -> None:
        self._plan = plan
        self._home = home
        self.directory = RunDirectory(home, NAME, "")
        self.took_s: list[float] = []  # until a slice whose primary was killed had another
        self._random = random.Random(f"server drill {plan.seed}")
        self._began = 0.0
        self._turn = 0

    def go(self, script: Sequence[str]) -> int | None:
        options = ["--workers", self._plan.workers, "--servers", self._plan.servers, "--restarts", 100000]
        command = [sys.executable, "-m", "holdfast", "run", "--run", NAME, "--dir", self._home]
        agent = subprocess.Popen([*map(str, [*command, *options]), *script], start_new_session=True)
        try:
            self._wait_for_steps(agent)
            self._began = time.monotonic()
            _say(f"all servers serve; one is killed about every {self._plan.kill_servers_every_s:g} s")
            self._break(agent)
            return agent.wait(timeout=START_S_MAX + self._plan.for_s)
        except (KeyboardInterrupt, subprocess.TimeoutExpired):
            return None
        finally:
            if agent.poll() is None:
                agent.send_signal(signal.SIGTERM)
                with suppress(subprocess.TimeoutExpired):
                    agent.wait(timeout=END_S)
                agent.kill()

    def _wait_for_steps(self, agent: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + START_S_MAX
        while agent.poll() is None and time.monotonic() < deadline:
            with suppress(OSError):
                if any(event["kind"] == "progress" for event in read_events(self.directory.events)):
                    return
            time.sleep(LOOK_S)

    def _break(self, agent: subprocess.Popen[bytes]) -> None:
        number = 0
        while agent.poll() is None and time.monotonic() < self._began + self._plan.for_s:
            number += 1
            at = self._began + self._plan.kill_servers_every_s * (number + self._random.uniform(-JITTER, JITTER))
            while agent.poll() is None and time.monotonic() < at:
                time.sleep(LOOK_S)
            while agent.poll() is None and not self._kill_one():
                time.sleep(LOOK_S)

    def _kill_one(self) -> bool:
        """Whether a server could be killed without the loss of a majority."""
        slices, servers = self._known()
        if not slices or not all(_survives(one, servers) for one in slices.values()):
            return False
        name = sorted(slices)[self._turn % len(slices)]
        victim = slices[name].primary
        if victim not in servers:
            return False
        self._turn += 1
        with suppress(ProcessLookupError):
            os.kill(servers[victim].pid, signal.SIGKILL)
        killed = time.monotonic()
        _say(f"{killed - self._began:6.1f} s  kill -9 {victim}, the primary of {name}")
        while time.monotonic() < killed + END_S:
            changed = self._known()[0].get(name)
            if changed is not None and changed.primary != victim:
                self.took_s.append(round(time.monotonic() - killed, 3))
                return True
            time.sleep(LOOK_S / 10)
        return True

    def _known(self) -> tuple[dict[str, Configuration], dict[str, Registration]]:
        try:
            place: dict[str, Any] = json.loads((self.directory.path / "run.json").read_text())
            socket = Path(place["socket_dir"]) / LEDGER_SOCKET
            ledger = open_ledger("", NAME, socket, self.directory.secret())
        except (OSError, ValueError, KeyError, HoldfastError):
            return {}, {}
        try:
            slices = {
                entry.key[len(KEY_SLICE) :]: decode_configuration(decode_json(entry.value))
                for entry in ledger.read(KEY_SLICE).entries
            }
            servers = {
                entry.key[len(KEY_SERVERS) :]: Registration.decode(entry.value)
                for entry in ledger.read(KEY_SERVERS).entries
            }
            return slices, servers
        except HoldfastError:
            return {}, {}
        finally:
            ledger.close()


def _survives(configuration: Configuration, servers: dict[str, Registration]) -> bool:
    living = sum(replica in servers for replica in configuration.replicas)
    return living - 1 >= configuration.majority


def _say(text: str) -> None:
    print(f"drill | {text}", flush=True)
