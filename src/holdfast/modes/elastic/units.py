"""The data of steps that may lack shards: a step takes the first units that nobody has used (data/cursor.py)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from holdfast.data.cursor import Cursor
from holdfast.data.shards import ShardPlace, ShardPlan
from holdfast.modes.port import DataPlan


class UnitsInLine(DataPlan):
    """Knows of one step only: the next. What is asked of a step is asked of that one."""

    def __init__(self, plan: ShardPlan) -> None:
        self._plan = plan
        self._cursor = Cursor(plan.shards, plan.steps_per_epoch)
        self._places: list[ShardPlace] | None = None  # of the next step

    def place(self, step: int, shard: int) -> ShardPlace | None:
        if self._places is None:
            self._places = self._cursor.places()
        return self._places[shard] if shard < len(self._places) else None

    def epoch(self, step: int) -> int:
        return self._cursor.epoch

    def ends_epoch(self, step: int, shards: Sequence[int] | None = None) -> bool:
        return self._cursor.ends_epoch(shards)

    def samples(self, step: int, shards: Sequence[int] | None) -> int:
        return len(shards or ()) * self._plan.samples_per_shard

    def first_step(self, epoch: int) -> int | None:
        return None

    def upcoming(
        self, step: int, now: Sequence[int], later: Sequence[int], *, room: int, until: int, passed: Collection[int]
    ) -> Iterator[ShardPlace]:
        return self._cursor.upcoming(now, later, room, max(1, until - step))

    def begin(self, step: int) -> None:
        self._cursor.begin(step)
        self._places = None

    def steps_left(self, step: int, epochs: int) -> int:
        more = (epochs - 1 - self._cursor.epoch) * self._plan.steps_per_epoch
        return self._cursor.steps_left + more if self._cursor.epoch < epochs else 0

    def applied(self, shards: Sequence[int] | None) -> None:
        self._cursor.used(shards or ())
        self._places = None

    def state(self) -> dict[str, Any]:
        return self._cursor.state()

    def load(self, state: Mapping[str, Any]) -> None:
        self._cursor.load(state)
        self._places = None
