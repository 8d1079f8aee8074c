"""Simulated storage, and a worker's checkpoints in it, as `NoCheckpoints` (engine/transfer/checkpointing.py) has them.

A checkpoint is committed when all members of its save have written: whoever dies before leaves it open for ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from holdfast.engine.transfer.checkpointing import NoCheckpoints
from holdfast.membership import messages as m
from holdfast.state.snapshot import Holder, Snapshot

if TYPE_CHECKING:
    from tests.harness.runtime.process import Process
    from tests.harness.runtime.world import World

LAST_S = 60.0  # for the others' parts of the last save


class Storage:
    def __init__(self, world: World) -> None:
        self._world = world
        self.committed: dict[int, Snapshot] = {}
        self._written: dict[tuple[int, tuple[str, ...]], set[str]] = {}

    def write(self, worker: str, members: tuple[str, ...], snapshot: Snapshot) -> None:
        written = self._written.setdefault((snapshot.step, members), set())
        written.add(worker)
        self._world.books.check_saved(worker, snapshot)
        if written >= set(members):
            self.committed[snapshot.step] = snapshot
            self._world.trace("storage has a checkpoint of step", snapshot.step)

    @property
    def newest(self) -> int | None:
        return max(self.committed, default=None)


class WorkerCheckpoints(NoCheckpoints):
    keeps = True

    def __init__(self, process: Process, holder: Holder, every: int) -> None:
        self._process = process
        self._storage = process.world.storage
        self._kernel = process.kernel
        self._rng = process.world.timeline.rng
        self._holder = holder
        self._every = every
        self._begun: int | None = None
        self._search_at: float | None = None

    def is_due(self, step: int, *, first: bool) -> bool:
        return step % self._every == 0

    def save(
        self, step: int, members: tuple[str, ...], metrics: Mapping[str, float], *, mark: int = 0, wanted: bool = False
    ) -> None:
        self._begun, self.saving = step, True
        snapshot = self._holder.capture(step).copied()

        def write() -> None:
            self._kernel.sleep(self._rng.choice((0.01, 0.1, 1.0)))
            self._storage.write(self._process.id, members, snapshot)
            self.saving = False

        self._kernel.start("saves", write)

    def save_last(self, step: int, members: tuple[str, ...], metrics: Mapping[str, float]) -> None:
        if self._begun != step:
            self.save(step, members, metrics)

    def settle(self, step: int) -> str:
        until = self._kernel.now() + LAST_S
        while (self._storage.newest or -1) < step:
            if self._kernel.now() >= until:
                return ""  # somebody of its members is gone: the old simulator has what becomes of such saves
            self._kernel.sleep(0.1)
        return ""

    def leave(self, step: int, members: tuple[str, ...], metrics: Mapping[str, float], *, save: bool) -> str:
        if save and self._storage.newest != step:
            snapshot = self._holder.capture(step).copied()
            self._kernel.sleep(self._rng.choice((0.01, 0.1)))
            self._storage.write(self._process.id, (self._process.id,), snapshot)
        return ""

    def newest(self) -> tuple[int | None, str]:
        return self._storage.newest, "storage"

    def search_at(self, when: float | None) -> None:
        self._search_at = when

    def is_search_due(self, now: float) -> bool:
        return self._search_at is not None and now >= self._search_at

    def search(self) -> m.Restored | None:
        self._search_at = None
        self._kernel.sleep(self._rng.choice((0.05, 0.5, 2.0)))
        step = self._storage.newest
        if step is not None:
            self._holder.restore(self._storage.committed[step].copied(), adopt=True)
        return m.Restored(step)
