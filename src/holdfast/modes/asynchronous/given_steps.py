"""The data of steps that are handed out: a step of this worker's loop has the data of a unit that it is given, or none.

A worker's loop goes through all steps of the run in order, so that schedulers, epochs and the script's own counting are
as in any mode. Steps that other workers make have no shards here. A unit is the ShardPlan's step of that number; one
that a lost worker has left is computed in whatever step this worker is at.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from holdfast.data.shards import ShardPlace, ShardPlan
from holdfast.modes.port import DataPlan

NEXT, LEFT = "units_next", "units_left"


class GivenSteps(DataPlan):
    def __init__(self, plan: ShardPlan) -> None:
        self._plan = plan
        self.unit: int | None = None  # that the next step with shards has the data of
        self.is_done = False  # nothing is left to do in this loop
        self.begins_at: tuple[int, tuple[int, ...]] = (0, ())  # of a state: the next unit, and those left before it

    def is_mine(self, step: int) -> bool:
        """Whether this worker computes in this step."""
        return self.unit is not None and self.unit <= step

    def place(self, step: int, shard: int) -> ShardPlace | None:
        return (self.unit, shard) if self.unit is not None and self.is_mine(step) else None

    def epoch(self, step: int) -> int:
        return self._plan.epoch_of(step)

    def ends_epoch(self, step: int, shards: Sequence[int] | None = None) -> bool:
        return self._plan.ends_epoch(step)

    def samples(self, step: int, shards: Sequence[int] | None) -> int:
        return self._plan.samples_in(self.unit) if shards and self.unit is not None else 0

    def samples_made(self, step: int, here: int) -> int:
        return self._plan.samples_in(step)

    def first_step(self, epoch: int) -> int | None:
        return self._plan.first_step(epoch)

    def upcoming(
        self, step: int, now: Sequence[int], later: Sequence[int], *, room: int, until: int, passed: Collection[int]
    ) -> Iterator[ShardPlace]:
        if self.unit is not None:
            yield from ((self.unit, shard) for shard in now)

    def is_over(self, steps: int) -> bool:
        return self.is_done

    def state(self) -> dict[str, Any]:
        return {NEXT: self.begins_at[0], LEFT: list(self.begins_at[1])}

    def load(self, state: Mapping[str, Any]) -> None:
        self.begins_at = int(state.get(NEXT, 0)), tuple(int(unit) for unit in state.get(LEFT, ()))
