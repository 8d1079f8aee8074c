"""What stands for a simulated worker's weights: the shards in each of its updates; and what it has used of the data.

Where steps are whole they are the same whatever happens. Where steps need not be, they depend on the faults: what is
promised is that all members have the same, and that nothing of the data is used twice.
"""

from __future__ import annotations

from holdfast.data.cursor import Cursor
from holdfast.membership import messages as m
from tests.harness.simulator.schedule import Schedule, Violation

STEPS_PER_EPOCH = 3


class Weights:
    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._cursor = Cursor(schedule.shards, STEPS_PER_EPOCH)
        self.updates: tuple[tuple[int, ...], ...] = ()  # the shards of each
        self._used: frozenset[tuple[int, int]] = frozenset()
        self._means: dict[int, tuple[int, ...]] = {}  # by step: the shards of the newest
        self.lines: tuple[int, ...] = ()  # the loops of the script after which its lines have changed them
        self.loops = 0  # of the script that are in them
        self._kept: dict[int, tuple[int, ...]] = {}  # and of those that are kept for who was left behind

    def there(self, shards: tuple[int, ...]) -> tuple[int, ...]:
        """Those of these shards that the next step has."""
        whole = self._schedule.step_rules.whole
        count = self._schedule.shards if whole else len(self._cursor.places())
        return tuple(shard for shard in shards if shard < count)

    def add(self, effect: m.Reduce) -> None:
        self._means = {effect.step: tuple(sorted(shard for _, shards in effect.shards for shard in shards))}

    def is_sent(self, step: int, giver: Weights) -> None:
        self._means[step] = giver._means[step] if step in giver._means else giver._kept[step]

    def keep(self, step: int) -> None:
        if step in self._means:
            self._kept[step] = self._means[step]

    def mean_of(self, step: int) -> tuple[int, ...]:
        return self._means[step]

    def apply(self, step: int, shards: tuple[int, ...] | None = None) -> None:
        shards = self._means[step] if shards is None else shards
        places = self._cursor.places()
        if not self._schedule.step_rules.whole:
            fresh = {places[shard] for shard in shards}
            if fresh & self._used:
                raise Violation(f"step {step} uses {sorted(fresh & self._used)} of the data again")
            self._used |= fresh
            self._cursor.used(shards)
        self.updates = (*self.updates, shards)

    def fetch(self, other: Weights) -> None:
        self._cursor.load(other._cursor.state())
        self.updates, self._used = other.updates, other._used
        self.lines, self.loops = other.lines, other.loops

    def copy(self) -> Weights:
        twin = Weights(self._schedule)
        twin.fetch(self)
        return twin

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, Weights) and self.updates == other.updates
        return same and self._cursor.state() == other._cursor.state()  # type: ignore[attr-defined]

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"{self.updates[-3:]} {self._cursor.state()}"
