"""A run of real processes, started with `holdfast run` and seen from outside through its event logs.

Whoever breaks a run on purpose (drills, the demo, tests) must know who lives, who is a member and how far the training
is, and that nothing is left behind at the end. `ObservedRun` is one agent with its workers; `ObservedHosts` is a run of
several agents, in network namespaces that can be cut (switchboard.py) or on loopback. Each is owned by one thread, and
what it knows is as of its last `look`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.events import EventReader
from holdfast.placement.directory import RunDirectory, home_directory
from holdfast.placement.proc import find_servers, find_workers, process_state

WAIT_S = 120.0
PERIOD_S = 0.01
SCALE_TRIES_S = 30.0
LOG_SHOWN = 3000  # characters of an agent's output, when it ended too early


class Failed(Exception):
    """The run did not do what it promises."""


class Observed:
    """What one can ask of a run, be it on one host or on several."""

    step = 0  # the newest that is known of; progress events come rarely

    @property
    def parts(self) -> Sequence[ObservedRun]:
        """One for each host that is part of the run."""
        raise NotImplementedError

    @property
    def running(self) -> Sequence[ObservedRun]:
        """Those whose agents are expected to run to the end."""
        return self.parts

    def start(self) -> None:
        for part in self.parts:
            part.start()

    def look(self) -> None:
        """Read what the event logs have to say that is new."""
        for part in self.parts:
            part.look()
            self.step = max(self.step, part.step)

    @property
    def events(self) -> list[dict[str, Any]]:
        """All of them, by time."""
        return sorted((event for part in self.parts for event in part.seen), key=lambda event: float(event["t"]))

    @property
    def views(self) -> dict[int, tuple[str, ...]]:
        """The members of each view, by its number."""
        return {number: members for part in self.parts for number, members in part.views_seen.items()}

    @property
    def view(self) -> int:
        return max((part.newest_view for part in self.parts), default=0)

    @property
    def members(self) -> tuple[str, ...]:
        return self.views.get(self.view, ())

    @property
    def evicted(self) -> int:
        return sum(event["kind"] == "evicted" for part in self.parts for event in part.seen)

    @property
    def pids(self) -> dict[str, int]:
        """Of the workers that were started and have not ended."""
        return {worker: pid for part in self.parts for worker, pid in part.started.items()}

    @property
    def digests(self) -> dict[str, str]:
        """Of the workers that finished."""
        return {worker: digest for part in self.parts for worker, digest in part.finished.items()}

    def living_registered(self) -> list[str]:
        return self._living(worker for part in self.parts for worker in part.registered)

    def living_members(self) -> list[str]:
        return self._living(self.members)

    def _living(self, workers: Iterable[str]) -> list[str]:
        pids = self.pids
        return [worker for worker in workers if worker in pids and process_state(pids[worker])]

    def over(self) -> bool:
        """Whether no agent is left."""
        return all(part.agent is None or part.agent.poll() is not None for part in self.running)

    def wait(
        self, condition: Callable[[], bool], what: str, timeout_s: float = WAIT_S, *, period_s: float = PERIOD_S
    ) -> None:
        deadline = time.monotonic() + timeout_s
        while True:
            over = self.over()  # asked first: the last events then count
            self.look()
            if condition():
                return
            if over:
                raise Failed(f"the run was over while waiting for {what}:\n{self.last_words()}")
            if time.monotonic() > deadline:
                raise Failed(f"waited {timeout_s:.0f} s for {what}; at step {self.step}, view {self.view}")
            time.sleep(period_s)

    def finish(self, timeout_s: float) -> str:
        """Wait for the end on every host that takes part; the digest that all workers that finished agree on."""
        self.wait(self.over, "the end of the run", timeout_s, period_s=0.05)
        self.look()
        for part in self.running:
            if part.agent is not None and part.agent.returncode != 0:
                where = f" of {part.host}" if part.host else ""
                code = part.agent.returncode
                raise Failed(f"the agent{where} ended with exit code {code}:\n{self.last_words()}")
        digests = set(self.digests.values())
        if len(digests) != 1:
            raise Failed(f"the workers ended with different weights: {self.digests}")
        return digests.pop()

    def log(self) -> str:
        """What the agents printed."""
        return "\n".join(part.log() for part in self.parts)

    def last_words(self) -> str:
        """The ends of that."""
        return "\n".join(f"--- {part.host}\n{part.log()[-LOG_SHOWN:]}" for part in self.parts)

    def end(self) -> None:
        """Nothing of the run is left behind, whatever happened."""
        for part in self.parts:
            if part.agent is not None:
                part.power_off()


class ObservedRun(Observed):
    """One agent with its workers. Of a run on several hosts it is one host's part; `prefix` is what brings its
    commands to that host."""

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
        self.seen: list[dict[str, Any]] = []
        self.started: dict[str, int] = {}  # the processes of workers that have not ended
        self.finished: dict[str, str] = {}  # the digests of workers that have
        self.registered: set[str] = set()
        self.views_seen: dict[int, tuple[str, ...]] = {}
        self.newest_view = 0

    @property
    def parts(self) -> Sequence[ObservedRun]:
        return (self,)

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
            try:
                self.fold(event)
            except (KeyError, TypeError):  # damaged, as on a full disk
                continue
            self.seen.append(event)

    def fold(self, event: dict[str, Any]) -> None:
        kind = event["kind"]
        if kind == "worker_started":
            self.started[event["worker"]] = event["pid"]
        elif kind == "worker_exited":
            self.started.pop(event["worker"], None)
        elif kind == "view":
            self.views_seen[event["view"]] = tuple(event["members"])
            self.newest_view = max(self.newest_view, event["view"])
        elif kind == "progress":
            self.step = max(self.step, event["step"])
        elif kind == "finished":
            self.finished[event["who"]] = event["digest"]
        elif kind == "registered":
            self.registered.add(event["who"])

    def scale(self, workers: int) -> None:
        name = f"{self.name}@{self.host}" if self.host else self.name
        command = [*self._prefix, sys.executable, "-m", "holdfast", "scale", "--dir", str(self.home), name]
        deadline = time.monotonic() + SCALE_TRIES_S
        while (done := subprocess.run([*command, str(workers)], capture_output=True, text=True)).returncode != 0:
            if time.monotonic() > deadline:  # until then the agent may be coming up
                raise Failed(f"holdfast scale: {done.stderr.strip()}")
            time.sleep(0.1)

    @property
    def log_path(self) -> Path:
        return self.home / f"{self.directory.path.name}.log"

    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def last_words(self) -> str:
        return self.log()[-LOG_SHOWN:]

    def kill_agent(self) -> None:
        """The workers live on, until somebody takes them over with `start`."""
        assert self.agent is not None
        self.agent.kill()
        self.agent.wait(10)

    def power_off(self) -> None:
        """End the agent, all workers and servers at once. The agent goes first: it would replace them."""
        self.kill_agent()
        for worker in (*find_workers(self.directory.path), *find_servers(self.directory.path)):
            send(worker.pid, signal.SIGKILL)
            self.started.pop(worker.worker, None)


class ObservedHosts(Observed):
    """A run on several hosts. A host is looked at as if it were reachable."""

    def __init__(self, parts: Iterable[ObservedRun]) -> None:
        self.hosts = {part.host: part for part in parts}
        self.off: set[str] = set()  # hosts without power

    @property
    def parts(self) -> Sequence[ObservedRun]:
        return tuple(self.hosts.values())

    @property
    def running(self) -> Sequence[ObservedRun]:
        return [part for host, part in self.hosts.items() if host not in self.off]

    def power_off(self, host: str) -> None:
        self.off.add(host)
        self.hosts[host].power_off()

    def power_on(self, host: str) -> None:
        self.off.discard(host)
        self.hosts[host].start()


def send(pid: int, number: int) -> None:
    """A signal to a process that may be gone already."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass
