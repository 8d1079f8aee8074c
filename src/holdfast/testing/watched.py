"""A run of real processes, started with `holdfast run` and seen from outside through its event log.

The faults of the exactness test and of the demo are done to it: they need to know who lives, who is a member and
how far the training is, and that nothing is left behind at the end.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.events import EventReader
from holdfast.launch.directory import RunDirectory, home_directory
from holdfast.launch.proc import find_workers, process_state

WAIT_S = 120.0
SCALE_TRIES_S = 30.0
LOG_SHOWN = 3000  # characters of the agent's output, when it ended too early


class Failed(Exception):
    """The run did not do what it promises."""


class Watched:
    """Owned by one thread. What it knows is as of the last `look`.

    Of a run on several hosts it is one host's part; `prefix` is what brings its commands to that host.
    """

    def __init__(
        self,
        home: Path,
        name: str,
        options: list[str],
        script: list[str],
        *,
        host: str = "",
        prefix: Sequence[str] = (),
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """`variables`: more of the environment, for the agent and its workers."""
        self._variables = dict(variables or {})
        self.home = home
        self.name = name
        self.host = host
        self._options = [*options, "--host", host] if host else options
        self._script = script
        self._prefix = prefix
        self.directory = RunDirectory(home_directory(str(home)), name, host)
        self._reader = EventReader(self.directory.events)
        self.agent: subprocess.Popen[bytes] | None = None
        self.pids: dict[str, int] = {}  # of workers that live
        self.members: tuple[str, ...] = ()
        self.view = 0
        self.step = 0
        self.digests: dict[str, str] = {}  # of workers that finished
        self.evicted = 0
        self.registered: set[str] = set()

    def start(self) -> None:
        command = [*self._prefix, sys.executable, "-m", "holdfast", "run", "--dir", str(self.home), "--run", self.name]
        with self.log_path.open("ab") as output:
            self.agent = subprocess.Popen(
                [*command, *self._options, *self._script],
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, **self._variables},
            )

    def look(self) -> None:
        for event in self._reader.poll():
            self.fold(event)

    def fold(self, event: dict[str, Any]) -> None:
        kind = event["kind"]
        if kind == "worker_started":
            self.pids[event["worker"]] = event["pid"]
        elif kind == "worker_exited":
            self.pids.pop(event["worker"], None)
        elif kind == "view" and event["view"] > self.view:
            self.view, self.members = event["view"], tuple(event["members"])
        elif kind == "progress":
            self.step = max(self.step, event["step"])
        elif kind == "finished":
            self.digests[event["who"]] = event["digest"]
        elif kind == "registered":
            self.registered.add(event["who"])
        elif kind == "evicted":
            self.evicted += 1

    def living_registered(self) -> list[str]:
        return [worker for worker in self.registered if worker in self.pids and process_state(self.pids[worker])]

    def living_members(self) -> list[str]:
        return [member for member in self.members if member in self.pids and process_state(self.pids[member])]

    def wait(
        self, condition: Callable[[], bool], what: str, timeout_s: float = WAIT_S, *, period_s: float = 0.01
    ) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            over = self.agent is None or self.agent.poll() is not None  # asked first: its last events then count
            self.look()
            if condition():
                return
            if over:
                raise Failed(f"the run was over while waiting for {what}:\n{self.log()[-LOG_SHOWN:]}")
            if time.monotonic() > deadline:
                raise Failed(f"waited {timeout_s:.0f} s for {what}; at step {self.step}, view {self.view}")
            time.sleep(period_s)

    def scale(self, workers: int) -> None:
        name = f"{self.name}@{self.host}" if self.host else self.name
        command = [
            *self._prefix,
            sys.executable,
            "-m",
            "holdfast",
            "scale",
            "--dir",
            str(self.home),
            name,
            str(workers),
        ]
        deadline = time.monotonic() + SCALE_TRIES_S
        while (done := subprocess.run(command, capture_output=True, text=True)).returncode != 0:
            if time.monotonic() > deadline:  # until then the agent may be coming up
                raise Failed(f"holdfast scale: {done.stderr.strip()}")
            time.sleep(0.1)

    def finish(self, timeout_s: float) -> str:
        """Wait for the end; the digest that every worker that finished agrees on."""
        agent = self.agent
        assert agent is not None
        self.wait(lambda: agent.poll() is not None, "the end of the run", timeout_s, period_s=0.05)
        self.look()
        if agent.returncode != 0:
            raise Failed(f"holdfast run ended with exit code {agent.returncode}:\n{self.log()[-LOG_SHOWN:]}")
        digests = set(self.digests.values())
        if len(digests) != 1:
            raise Failed(f"the workers ended with different weights: {self.digests}")
        return digests.pop()

    @property
    def log_path(self) -> Path:
        return self.home / f"{self.directory.path.name}.log"

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def end(self) -> None:
        """Nothing of the run is left behind, whatever happened. The agent goes first: it would replace workers."""
        if self.agent is None:
            return
        self.power_off()

    def power_off(self) -> None:
        """End the agent and all workers at once."""
        assert self.agent is not None
        if self.agent.poll() is None:
            self.agent.kill()
        self.agent.wait(10)
        for worker in find_workers(self.directory.path):
            send(worker.pid, signal.SIGKILL)
            self.pids.pop(worker.worker, None)


def send(pid: int, number: int) -> None:
    """A signal to a process that may be gone already."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
