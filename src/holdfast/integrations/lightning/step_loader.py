"""What stands for the training's DataLoader in the trainer: as many tokens an epoch as it has updates. No data."""

from __future__ import annotations

from collections.abc import Callable, Iterator


class StepBatch:
    """The batch of a step, whose shards are computed wherever they fall. No dataclass: it would be looked into."""

    def __init__(self, step: int) -> None:
        self.step = step


class StepLoader:
    """`next_batch` begins a step. StopIteration from it: the run has ended."""

    def __init__(self, steps_per_epoch: int, next_batch: Callable[[], StepBatch]) -> None:
        self._steps_per_epoch = steps_per_epoch
        self._next_batch = next_batch

    def __len__(self) -> int:
        return self._steps_per_epoch

    def __iter__(self) -> Iterator[StepBatch]:
        return _StepIterator(self._next_batch)


class _StepIterator:
    def __init__(self, next_batch: Callable[[], StepBatch]) -> None:
        self._next_batch = next_batch

    def __iter__(self) -> _StepIterator:
        return self

    def __next__(self) -> StepBatch:
        return self._next_batch()
