"""Where a drill takes place: the home of its runs, its storage, its hosts and their ledger; and what can be taken away.

One host by default, with everything embedded. With `--hosts N` each host is a network namespace, and an etcd of three
members is in namespaces of its own. Everything it makes goes when it is closed, whatever happened.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from holdfast.agent.hosts.etcd_cluster import EtcdCluster
from holdfast.core.errors import ConfigError, LedgerUnavailable
from holdfast.core.options.run import AUTO
from holdfast.drills.plan import DrillPlan
from holdfast.drills.trace import TRACE
from holdfast.testing.observed_run import Observed, ObservedHosts, ObservedRun
from holdfast.testing.switchboard import Switchboard
from holdfast.trust.keys import create_keys

AUDIT_EVERY = 10  # steps, where a bit is flipped
KEPT = 5  # checkpoints: the run must find one from before the flip
TMPFS_SHARE = 4  # a full disk is a tmpfs of up to a quarter of the memory
RIG = ("-m", "holdfast.drills.rig")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a drill's runs are started."""

    workers: int
    spares: int = 0
    hosts: int = 1
    options: tuple[str, ...] = ()  # more of `holdfast run`
    checkpoints: bool = False  # in the ground's storage, which can be taken away
    small_disk: bool = False  # that storage can be full


def setting_of(plan: DrillPlan) -> Setting:
    options = ["--restarts", "100000", "--save-every", plan.save_every, "--keep", str(KEPT)]
    if plan.ranks > 1:
        options += ["--ranks", str(plan.ranks)]
    if plan.path != AUTO:
        options += ["--path", plan.path]
    if plan.keep_best:
        options += ["--keep-best", plan.keep_best]
    if plan.corrupt:
        fraction = "1" if plan.corrupt == "gradient" else "0"
        options += ["--audit", fraction, "--audit-every", str(AUDIT_EVERY)]
    return Setting(
        workers=plan.workers,
        spares=plan.spares,
        hosts=plan.hosts,
        options=tuple(options),
        checkpoints=True,
        small_disk=plan.disk_full_s > 0,
    )


class Ground:
    """The runs of one drill, by their names, and what is under them."""

    def __init__(self, setting: Setting, home: Path, script: Sequence[str]) -> None:
        self._setting = setting
        self._home = home
        self._script = list(script)
        self._stack = ExitStack()
        self._storage = home / "storage"
        self._tmpfs_bytes = 0
        self.board: Switchboard | None = None
        self.cluster: EtcdCluster | None = None

    def __enter__(self) -> Ground:
        try:
            self._storage.mkdir()
            if self._setting.small_disk:
                self._mount()
            if self._setting.hosts > 1:
                self._make_hosts()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @property
    def hosts(self) -> list[str]:
        return [f"h{number}" for number in range(1, self._setting.hosts + 1)]

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

    @property
    def network(self) -> Switchboard:
        assert self.board is not None
        return self.board

    # ---- runs

    def run(self, name: str, *script: str, alone: bool = False) -> Observed:
        """Not started yet; `script`: more arguments of it. It is ended with the ground at the latest.

        With `alone` it is on one host, without spares, even where others are on several.
        """
        traces = self.traces(name)
        traces.mkdir(parents=True)
        variables = {TRACE: str(traces)}
        options = list(self._setting.options)
        if self._setting.checkpoints:
            (self._storage / name).mkdir()
            options += ["--checkpoint", str(self._storage / name)]
        command = [*self._script, *script]
        setting = replace(self._setting, hosts=1, spares=0) if alone else self._setting
        run: Observed
        if setting.hosts == 1:
            sized = ["--workers", str(setting.workers), "--spares", str(setting.spares)]
            run = ObservedRun(self._home, name, [*sized, *options], command, variables=variables)
        else:
            parts = [self._part(name, index, options, command, variables) for index in range(setting.hosts)]
            run = ObservedHosts(parts)
        self._stack.callback(run.end)
        return run

    def size_of(self, host: str) -> int:
        """How many workers a host begins with."""
        index = self.hosts.index(host) if host else 0
        return len(range(index, self._setting.workers, self._setting.hosts))

    def _part(
        self, name: str, index: int, options: list[str], command: list[str], variables: dict[str, str]
    ) -> ObservedRun:
        assert self.cluster is not None
        host = self.hosts[index]
        spares = len(range(index, self._setting.spares, self._setting.hosts))
        sized = ["--workers", str(self.size_of(host)), "--spares", str(spares)]
        placed = ["--ledger", self.cluster.url, "--keys", str(self._home / "keys")]
        return ObservedRun(
            self._home,
            name,
            [*sized, *placed, *options],
            command,
            host=host,
            prefix=self.network.command(host),
            variables=variables,
        )

    def traces(self, name: str) -> Path:
        return self._home / "trace" / name

    def storage(self, name: str) -> Path:
        return self._storage / name

    # ---- outages

    def restart_ledger(self) -> None:
        assert self.cluster is not None
        try:
            self.cluster.start()
        except LedgerUnavailable:
            self.cluster.start()  # three members at once, on a busy machine

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
