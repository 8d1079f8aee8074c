"""Where a drill takes place: the home of its runs, its storage, its hosts and their ledger; and what can be taken away.

One host by default, with everything embedded. With `--hosts N` each host is a network namespace, and an etcd of three
members is in namespaces of its own. Everything it makes goes when it is closed, whatever happened.
"""

from __future__ import annotations

import os
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from holdfast.core.errors import ConfigError, LedgerUnavailable
from holdfast.drills.plan import Plan
from holdfast.drills.trace import TRACE
from holdfast.launch.etcd_cluster import EtcdCluster
from holdfast.testing.fleet import Fleet
from holdfast.testing.switchboard import Switchboard
from holdfast.testing.watched import Watched
from holdfast.trust.keys import create_keys

AUDIT_EVERY = 10  # steps, where a bit is flipped
KEPT = 5  # checkpoints: the run must find one from before the flip
TMPFS_SHARE = 4  # a full disk is a tmpfs of up to a quarter of the memory
RIG = ("-m", "holdfast.drills.rig")


class Recorded(Watched):
    """A run, or one host's part of it, whose events are kept."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.events: list[dict[str, Any]] = []
        self.views: dict[int, tuple[str, ...]] = {}  # number -> members

    def fold(self, event: dict[str, Any]) -> None:
        try:
            super().fold(event)
        except (KeyError, TypeError):  # damaged, as on a full disk
            return
        self.events.append(event)
        if event["kind"] == "view":
            self.views[event["view"]] = tuple(event["members"])


Run = Recorded | Fleet


class Ground:
    def __init__(self, plan: Plan, home: Path, script: list[str]) -> None:
        self._plan = plan
        self._home = home
        self._script = [*RIG, *script]
        self._stack = ExitStack()
        self._storage = home / "storage"
        self._tmpfs_bytes = 0
        self.board: Switchboard | None = None
        self.cluster: EtcdCluster | None = None

    def __enter__(self) -> Ground:
        try:
            self._storage.mkdir()
            if self._plan.disk_full_s:
                self._mount()
            if self._plan.hosts > 1:
                self._make_hosts()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def hosts(self) -> list[str]:
        return [f"h{number}" for number in range(1, self._plan.hosts + 1)]

    def _make_hosts(self) -> None:
        members = ["e1", "e2", "e3"]
        self.board = self._stack.enter_context(Switchboard([*self.hosts, *members]))
        self.cluster = EtcdCluster(
            self._home / "etcd",
            addresses=[self.board.address(member) for member in members],
            prefix_commands=[self.board.command(member) for member in members],
        )
        self._stack.enter_context(self.cluster)
        create_keys(self._home / "keys")

    # ---- runs

    def run(self, name: str) -> Run:
        """Not started yet. It is ended with the ground at the latest."""
        traces = self.traces(name)
        traces.mkdir(parents=True)
        (self._storage / name).mkdir()
        variables = {TRACE: str(traces)}
        options = [*self._options(), "--checkpoint", str(self._storage / name)]
        run: Run
        if self.board is None:
            sized = ["--workers", str(self._plan.workers), "--spares", str(self._plan.spares)]
            run = Recorded(self._home, name, [*sized, *options], self._script, variables=variables)
        else:
            run = Fleet(self._part(name, index, options, variables) for index in range(self._plan.hosts))
        self._stack.callback(run.end)
        return run

    def _part(self, name: str, index: int, options: list[str], variables: dict[str, str]) -> Recorded:
        assert self.board is not None and self.cluster is not None
        workers = len(range(index, self._plan.workers, self._plan.hosts))
        spares = len(range(index, self._plan.spares, self._plan.hosts))
        sized = ["--workers", str(workers), "--spares", str(spares)]
        placed = ["--ledger", self.cluster.url, "--keys", str(self._home / "keys")]
        host = self.hosts[index]
        return Recorded(
            self._home,
            name,
            [*sized, *placed, *options],
            self._script,
            host=host,
            prefix=self.board.command(host),
            variables=variables,
        )

    def _options(self) -> list[str]:
        options = ["--restarts", "100000", "--save-every", self._plan.save_every, "--keep", str(KEPT)]
        if self._plan.corrupt:
            fraction = "1" if self._plan.corrupt == "gradient" else "0"
            options += ["--audit", fraction, "--audit-every", str(AUDIT_EVERY)]
        return options

    def traces(self, name: str) -> Path:
        return self._home / "trace" / name

    def storage(self, name: str) -> Path:
        return self._storage / name

    # ---- outages

    def cut_off(self, host: str) -> None:
        assert self.board is not None
        self.board.isolate(host)

    def join_up(self) -> None:
        assert self.board is not None
        self.board.heal()

    def take_ledger(self, run: Run) -> str:
        """Returns what was done."""
        if self.cluster is not None:
            for member in range(len(self.cluster.members)):
                self.cluster.kill(member)
            return "kill -9 all members of etcd"
        assert isinstance(run, Recorded) and run.agent is not None
        run.agent.kill()
        run.agent.wait()
        return f"kill -9 the agent (process {run.agent.pid}), and the ledger with it"

    def give_ledger(self, run: Run) -> None:
        if self.cluster is not None:
            try:
                self.cluster.start()
            except LedgerUnavailable:
                self.cluster.start()  # three members at once, on a busy machine
            return
        assert isinstance(run, Recorded)
        run.start()

    def take_storage(self, name: str) -> None:
        """As a volume that is unmounted: what is there is safe, and nobody can get at it."""
        place = self.storage(name)
        place.rename(place.with_suffix(".away"))
        place.touch()

    def give_storage(self, name: str) -> None:
        place = self.storage(name)
        place.unlink(missing_ok=True)
        place.with_suffix(".away").rename(place)

    def _mount(self) -> None:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self._tmpfs_bytes = memory // TMPFS_SHARE
        command = ["mount", "-t", "tmpfs", "-o", f"size={self._tmpfs_bytes},mode=700", "holdfast-drill"]
        done = subprocess.run([*command, str(self._storage)], capture_output=True, text=True)
        if done.returncode:
            raise ConfigError(
                f"--disk-full cannot be done here: {done.stderr.strip()}", hint="leave it out, or mount as root"
            )
        # Lazily: a worker that is being killed may still have a file open there.
        self._stack.callback(subprocess.run, ["umount", "-l", str(self._storage)], capture_output=True)

    def fill_disk(self) -> None:
        """As full as it is now. No memory is filled up for that."""
        usage = os.statvfs(self._storage)
        used = (usage.f_blocks - usage.f_bfree) * usage.f_frsize
        self._resize(max(used, usage.f_frsize))  # a size of 0 would be no limit

    def empty_disk(self) -> None:
        self._resize(self._tmpfs_bytes)

    def _resize(self, size: int) -> None:
        subprocess.run(
            ["mount", "-o", f"remount,size={size}", str(self._storage)], check=True, capture_output=True, text=True
        )


def parts_of(run: Run) -> list[Recorded]:
    return [run] if isinstance(run, Recorded) else [part for part in run.hosts.values() if isinstance(part, Recorded)]


def events_of(run: Run) -> list[dict[str, Any]]:
    return sorted((event for part in parts_of(run) for event in part.events), key=lambda event: float(event["t"]))


def views_of(run: Run) -> dict[int, tuple[str, ...]]:
    return {number: members for part in parts_of(run) for number, members in part.views.items()}
