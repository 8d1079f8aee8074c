"""The data of steps whose batches are read by one worker and handed to all with the mean of the step before.

The reader is the worker that has read before; when it is gone, the first that has the state. All know who it is, since
the last batch says who has read it. Owns nothing: the batches are the plan's, and belong to the state.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from holdfast.core.errors import ProtocolError
from holdfast.data.iterables.handed import HandedBatches
from holdfast.data.shards import ShardPlace, ShardPlan
from holdfast.modes.port import DataPlan

_KEY = "next_batch"


class HandedSteps(DataPlan):
    def __init__(self, plan: ShardPlan, batches: HandedBatches) -> None:
        self._plan = plan
        self._batches = batches
        self._unread = secrets.token_hex(8)  # so that nobody takes a state in which nothing was read for its own

    def place(self, step: int, shard: int) -> ShardPlace | None:
        return step, shard

    def epoch(self, step: int) -> int:
        current = self._batches.current
        return current.epoch if current is not None else 0

    def ends_epoch(self, step: int, shards: Sequence[int] | None = None) -> bool:
        return self._batches.ends_epoch

    def samples(self, step: int, shards: Sequence[int] | None) -> int:
        return self._plan.samples_in(step)

    def first_step(self, epoch: int) -> int | None:
        return 0 if epoch == 0 else None

    def steps_left(self, step: int, epochs: int) -> int:
        current = self._batches.current
        if current is None:
            return 1
        if current.epoch >= epochs:
            return 0
        return max(1, (epochs - current.epoch) * current.epoch_steps - current.number)

    def upcoming(
        self, step: int, now: Sequence[int], later: Sequence[int], *, room: int, until: int, passed: Collection[int]
    ) -> Iterator[ShardPlace]:
        return iter(())

    def ahead(self, step: int, me: str, members: Sequence[str]) -> str:
        last = self._batches.ensure(me).reader
        self._batches.step()
        reader = last if last in members else members[0]
        return self._batches.ahead(me) if reader == me else ""

    def told(self, step: int, ahead: str) -> None:
        if not ahead:
            raise ProtocolError(f"nobody has said which batch follows that of step {step}")
        self._batches.told(ahead)

    def serve(self, me: str) -> None:
        self._batches.ensure(me)

    def applied(self, shards: Sequence[int] | None) -> None:
        self._batches.applied()

    def state(self) -> dict[str, Any]:
        current = self._batches.current
        if current is None:
            return {_KEY: self._unread}
        return {_KEY: torch.frombuffer(bytearray(current.message), dtype=torch.uint8)}

    def load(self, state: Mapping[str, Any]) -> None:
        found = state.get(_KEY)
        self._batches.load(found.numpy().tobytes() if isinstance(found, torch.Tensor) else None)
