"""Where a run whose steps need not be whole is in its data. Pure.

The data is a line of units: unit u is shard u % V of step u // V of the run's ShardPlan, so that it has the samples and
the random state which it would have there. A step takes the first units that nobody has used, at most V and all of one
epoch: its shard 0 is the first of them, its shard 1 the second, and so on. Those that were brought to the step's mean
are used up; the others, of a worker that was lost or was too slow, come first in the next step.

Invariants: a unit is used once, and an epoch is over when all of its units are. Belongs to the state, like the weights:
whoever has the one at a step has the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

UNKNOWN = -1


class Cursor:
    """`shards` of a full step, `steps_per_epoch` of full steps."""

    def __init__(self, shards: int, steps_per_epoch: int) -> None:
        self._shards = shards
        self._epoch_units = shards * steps_per_epoch
        self._next = 0  # the first unit that was never handed out
        self._left: tuple[int, ...] = ()  # handed out before that, and not used; fewer than `shards`

    @property
    def epoch(self) -> int:
        """Of the next step."""
        return self._first() // self._epoch_units

    @property
    def steps_left(self) -> int:
        """Full steps to the end of the epoch, at least."""
        left = (self.epoch + 1) * self._epoch_units - self._next + len(self._left)
        return -(-left // self._shards)

    def places(self) -> list[tuple[int, int]]:
        """Of the next step's shards, in their order: (step, shard) of the ShardPlan. Fewer at an epoch's end."""
        return [divmod(unit, self._shards) for unit in self._units()]

    def used(self, shards: Iterable[int]) -> None:
        """These shards of the step are in its mean."""
        units = self._units()
        gone = {units[shard] for shard in shards}
        reached = max([self._next, *(unit + 1 for unit in gone)])
        self._left = tuple(unit for unit in units if unit < reached and unit not in gone)
        self._next = reached

    def ends_epoch(self, shards: Iterable[int] | None = None) -> bool:
        """Whether an epoch is over after a step with these shards; None: with all of it."""
        after = self.copy()
        after.used(range(len(self._units())) if shards is None else shards)
        return after.epoch > self.epoch

    def upcoming(self, now: Sequence[int], later: Sequence[int], room: int, steps: int) -> Iterator[tuple[int, int]]:
        """The places that a worker will need if nothing happens: of these shards of this step, and of those later."""
        ahead = self.copy()
        for number in range(steps):
            places = ahead.places()
            yield from (places[shard] for shard in (later if number else now) if shard < len(places))
            ahead.used(range(min(room, len(places))))

    def copy(self) -> Cursor:
        twin = Cursor(self._shards, self._epoch_units // self._shards)
        twin._next, twin._left = self._next, self._left
        return twin

    def state(self) -> dict[str, Any]:
        return {"next_unit": self._next, "left_units": list(self._left)}

    def load(self, state: Mapping[str, Any]) -> None:
        self._next = int(state.get("next_unit", UNKNOWN))
        self._left = tuple(map(int, state.get("left_units", ())))

    def begin(self, step: int) -> None:
        """A state that says nothing of it, such as an imported one, has had that many full steps."""
        if self._next == UNKNOWN:
            self._next = step * self._shards

    def _first(self) -> int:
        return self._left[0] if self._left else self._next

    def _units(self) -> list[int]:
        """What was left goes first. A step has units of one epoch only: the next begins when it is over."""
        end = (self.epoch + 1) * self._epoch_units
        fresh = range(self._next, min(end, self._next + self._shards - len(self._left)))
        return [*self._left, *fresh]
