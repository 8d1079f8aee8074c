"""Runs on several hosts in network namespaces, with a real etcd in namespaces of its own."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from pathlib import Path

from holdfast.agent.hosts.etcd_cluster import EtcdCluster
from holdfast.core.words import host_of
from holdfast.events import read_events
from holdfast.testing.observed_run import ObservedHosts, ObservedRun
from holdfast.testing.switchboard import Switchboard
from holdfast.trust.keys import create_keys
from tests.soak.conducting import quiet_digest
from tests.soak.exactness import SCRIPT

MEMBERS = ("e1", "e2", "e3")
SHARDS = 8


class Land:
    """Hosts, the network between them, and the ledger."""

    def __init__(self, home: Path, board: Switchboard, hosts: Sequence[str], *, six: bool = False) -> None:
        self.home = home
        self.board = board
        self.hosts = tuple(hosts)
        addresses = [board.address6(member) if six else board.address(member) for member in MEMBERS]
        self.cluster = EtcdCluster(
            home / "etcd", addresses=addresses, prefix_commands=[board.command(member) for member in MEMBERS]
        )
        create_keys(home / "keys")

    def training(self, *options: str, steps: int = 200, workers: int = 1, pause_s: float = 0.04) -> Training:
        return Training(self, steps, options, workers, pause_s)


class Training(ObservedHosts):
    """The exactness script on all hosts of a land. `times` has a file for each worker: when it applied which step."""

    def __init__(self, land: Land, steps: int, options: Sequence[str], workers: int, pause_s: float) -> None:
        self.land = land
        self.home = land.home
        self.steps = steps
        self.times = land.home / "times"
        self.times.mkdir()
        script = [SCRIPT, "--steps", str(steps), "--pause", str(pause_s), "--times", str(self.times)]
        common = ["--ledger", land.cluster.url, "--keys", str(land.home / "keys"), "--workers", str(workers), *options]
        super().__init__(
            ObservedRun(land.home, "r", common, script, host=host, prefix=land.board.command(host))
            for host in land.hosts
        )

    def applied(self) -> dict[int, float]:
        """When each step was first applied by anyone."""
        first: dict[int, float] = {}
        for path in self.times.glob("*.times"):
            for line in path.read_text().splitlines():
                when, step = line.split()
                first[int(step)] = min(float(when), first.get(int(step), float("inf")))
        return first

    def at(self) -> int:
        """The newest step that was applied."""
        return max(self.applied(), default=-1)

    def wait_step(self, step: int, timeout_s: float = 60.0) -> None:
        self.wait(lambda: self.at() >= step, f"step {step}", timeout_s)

    def wait_more(self, steps: int, timeout_s: float = 60.0) -> None:
        """Wait until so many more steps are applied."""
        self.wait_step(self.at() + steps, timeout_s)

    def longest_gap(self, start: float, end: float) -> float:
        """The longest time without a new step in between."""
        moments = sorted(when for when in self.applied().values() if start <= when <= end)
        assert len(moments) > 2, f"{len(moments)} steps in {end - start:.1f} s"
        return max(later - earlier for earlier, later in pairwise(moments))

    def member_hosts(self) -> set[str]:
        return {host_of(member) for member in self.members}

    def said(self, host: str, text: str) -> bool:
        return text in self.hosts[host].log()

    def status(self, host: str) -> str:
        command = [*self.land.board.command(host), sys.executable, "-m", "holdfast", "status", f"r@{host}"]
        done = subprocess.run([*command, "--dir", str(self.home)], capture_output=True, text=True, timeout=30)
        return done.stdout + done.stderr

    def ends_exact(self, timeout_s: float = 120.0) -> None:
        """Let it run to its end as fast as it can."""
        assert self.at() < self.steps - 1, "it was over before the faults were"
        (self.times / "hurry").touch()
        assert self.finish(timeout_s) == expected_digest(self.steps)


@cache
def expected_digest(steps: int) -> str:
    """Of a quiet run on one host."""
    with tempfile.TemporaryDirectory(prefix="holdfast-quiet-") as home:
        return quiet_digest(Path(home), 1, [SCRIPT, "--steps", str(steps)])


@contextmanager
def land_of(home: Path, *hosts: str, six: bool = False) -> Iterator[Land]:
    with Switchboard([*hosts, *MEMBERS]) as board:
        land = Land(home, board, hosts, six=six)
        with land.cluster:
            yield land


@contextmanager
def started(training: Training) -> Iterator[Training]:
    """Started, and ended with the block, whatever happens; a failure shows what the agents said."""
    training.start()
    try:
        yield training
    except BaseException:
        print(training.log())
        for host in training.hosts.values():
            events = read_events(host.directory.events)
            for event in [event for event in events if event["kind"] != "progress"][-25:]:
                print(host.host, event)
        raise
    finally:
        training.end()


def wall() -> float:
    return time.time()
