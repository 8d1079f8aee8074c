"""The simulated ledger: keys, revisions, leases and a history for watches; strongly consistent, sometimes away.

A request that arrives while it is away is lost, or carried out when it is back, though its sender has long given up.
A new leader gives every lease its full time again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from holdfast.core.rewinds import Rewinds
from holdfast.core.words import KEY_REWINDS, KEY_VIEW, KEY_WORKERS

if TYPE_CHECKING:
    from tests.harness.simulator.world import World

LEASE_S = 2.0


@dataclass(frozen=True, slots=True)
class Entry:
    value: Any
    revision: int
    created: int
    lease: int


@dataclass(frozen=True, slots=True)
class Change:
    key: str
    entry: Entry | None  # None: deleted


class Ledger:
    def __init__(self, world: World) -> None:
        self.world = world
        self.up = True
        self.changed_at = 0.0  # when it last came or went
        self.revision = 0
        self.floor = 0  # changes up to this revision are forgotten
        self.entries: dict[str, Entry] = {}
        self._history: list[Change] = []  # revisions 1, 2, 3, ...
        self._leases: dict[int, float] = {}
        self._last_lease = 0
        self._waiting: list[Callable[[], object]] = []

    # ---- what it is asked to do; each call is one atomic operation

    def compare_and_set(
        self, key: str, value: Any, expected: int, lease: int = 0, while_at: tuple[str, int] | None = None
    ) -> int | None:
        if self.revision_of(key) != expected or (lease and lease not in self._leases):
            return None
        if while_at is not None and self.revision_of(while_at[0]) != while_at[1]:
            return None
        return self.put(key, value, lease)

    def revision_of(self, key: str) -> int:
        entry = self.entries.get(key)
        return entry.revision if entry else 0

    def put(self, key: str, value: Any, lease: int = 0) -> int | None:
        if lease and lease not in self._leases:
            return None
        old = self.entries.get(key)
        if key == KEY_VIEW:
            self.world.books.check_view(old.value if old else None, value)
        elif key == KEY_REWINDS:
            self.world.rewinds.check_record(old.value if old else Rewinds(), value)
        self.revision += 1
        self.entries[key] = Entry(value, self.revision, old.created if old else self.revision, lease)
        self._remember(key)
        return self.revision

    def delete(self, key: str) -> None:
        if self.entries.pop(key, None) is not None:
            self.revision += 1
            self._remember(key)

    def grant(self) -> int:
        self._last_lease += 1
        lease = self._last_lease
        self._leases[lease] = self.world.now + LEASE_S
        self.world.after(LEASE_S, lambda: self._look_at(lease))
        return lease

    def keep_alive(self, lease: int) -> bool:
        if lease not in self._leases:
            return False
        self._leases[lease] = self.world.now + LEASE_S
        return True

    def revoke(self, lease: int) -> None:
        if self._leases.pop(lease, None) is not None:
            for key in [key for key, entry in self.entries.items() if entry.lease == lease]:
                self.delete(key)

    def changes(self, after: int, up_to: int) -> list[Change]:
        assert after >= self.floor
        return self._history[after:up_to]

    # ---- its own life

    def when_up(self, act: Callable[[], object]) -> None:
        if self.up:
            act()
        else:
            self._waiting.append(act)

    def go_down(self) -> None:
        self.up = False
        self.changed_at = self.world.now

    def come_up(self) -> None:
        self.up = True
        self.changed_at = self.world.now
        for lease in self._leases:
            self._leases[lease] = self.world.now + LEASE_S
        waiting, self._waiting = self._waiting, []
        for act in waiting:
            act()

    def forget(self) -> None:
        """Compaction: who has not read up to here must read everything anew."""
        self.floor = self.revision

    def _remember(self, key: str) -> None:
        entry = self.entries.get(key)
        self._history.append(Change(key, entry))
        if entry is None and key.startswith(KEY_WORKERS):
            self.world.books.unregistered(key[len(KEY_WORKERS) :])
        for worker in self.world.workers.values():
            worker.feed.wake()

    def _look_at(self, lease: int) -> None:
        deadline = self._leases.get(lease)
        if deadline is None:
            return
        if not self.up:
            self.world.after(LEASE_S, lambda: self._look_at(lease))
        elif deadline > self.world.now:
            self.world.after(deadline - self.world.now, lambda: self._look_at(lease))
        else:
            held = [key for key, entry in self.entries.items() if entry.lease == lease]
            self.world.trace("lease", lease, "ran out, and with it", held)
            self.world.books.check_lapse(held)
            self.revoke(lease)
