"""The data of steps that are always whole: shard v of step s is the ShardPlan's. There is nothing to remember."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from holdfast.data.shards import ShardPlace, ShardPlan
from holdfast.modes.port import DataPlan


class WholeSteps(DataPlan):
    def __init__(self, plan: ShardPlan) -> None:
        self._plan = plan

    def place(self, step: int, shard: int) -> ShardPlace | None:
        return step, shard

    def epoch(self, step: int) -> int:
        return self._plan.epoch_of(step)

    def ends_epoch(self, step: int, shards: Sequence[int] | None = None) -> bool:
        return self._plan.ends_epoch(step)

    def samples(self, step: int, shards: Sequence[int] | None) -> int:
        return self._plan.samples_in(step)

    def first_step(self, epoch: int) -> int | None:
        return self._plan.first_step(epoch)

    def upcoming(
        self, step: int, now: Sequence[int], later: Sequence[int], *, room: int, until: int, passed: Collection[int]
    ) -> Iterator[ShardPlace]:
        yield from ((step, shard) for shard in now)
        for number in range(step + 1, until):
            yield from ((number, shard) for shard in (later if number not in passed else ()))
