"""One step of the user's loop: its shards, and after the last of them the mean. A thin client of the step engine.

The inner `for` is where a peer's death is absorbed: its shards are handed out here too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from holdfast.core.errors import ConfigError
from holdfast.engine.steps import Shard, StepEngine, StepState
from holdfast.reduce.reduction import Number
from holdfast.state.objects import pack_object, unpack_object

GATHERED_BYTES_MAX = 2 * 2**20  # of all shards of a step: they travel with what members say of their sums


class Step:
    """One update of the model. Iterate over it for this worker's shards; there may be none."""

    def __init__(self, engine: StepEngine, state: StepState) -> None:
        self._engine = engine
        self._state = state
        self.number = state.number
        self.epoch = state.epoch

    @property
    def ends_epoch(self) -> bool:
        """Where a step need not be whole, known for certain when the loop over the shards has ended."""
        return self._state.ends_epoch

    @property
    def samples(self) -> int:
        """That the mean is over, once the loop over the shards has ended."""
        return self._state.samples

    @property
    def metrics(self) -> Mapping[str, float]:
        """The means over all shards of what was recorded, once the loop over the shards has ended."""
        return self._state.metrics

    @property
    def skipped(self) -> bool:
        """Its update is not applied: every .grad is None when the loop over the shards has ended."""
        return self._state.skipped

    def record(self, **metrics: float | torch.Tensor) -> None:
        """Metrics of the shard at hand. `step.metrics` has their means over all shards once the loop has ended."""
        shard = self._shard("record", "step.metrics has the means over all shards")
        for name, value in metrics.items():
            shard.record(name, _number(name, value))

    def gather(self, value: Any) -> None:
        """Something of the shard at hand, for `step.gathered` on every worker. Of two calls the last counts."""
        shard = self._shard("gather", "step.gathered has the values of all shards")
        room = GATHERED_BYTES_MAX // self._engine.plan.shards
        shard.gathered = pack_object(value, path="the value given to step.gather", bytes_max=room)

    @property
    def gathered(self) -> list[Any]:
        """What `step.gather` was given, in the order of shards, the same for any number of workers."""
        self._state.check_complete()
        return [unpack_object(text) for text in self._state.gathered.values()]

    def __iter__(self) -> Iterator[Any]:
        engine = self._engine
        self._check_first()
        while not engine.reduce():
            while (shard := engine.open_shard()) is not None:
                try:
                    yield shard.batch
                except BaseException:  # the loop was left
                    engine.put_down()
                    raise
                engine.contribute(shard)

    def _check_first(self) -> None:
        if self._state.begun:
            raise ConfigError(
                f"the shards of step {self.number} were asked for twice",
                hint="go through them once: `for batch in step:`; a second pass over the same data is another step",
            )

    def _shard(self, what: str, afterwards: str) -> Shard:
        if self._engine.open is None:
            raise ConfigError(
                f"step.{what} was called outside the loop over the step's shards",
                hint=f"call it inside `for batch in step:`; afterwards {afterwards}",
            )
        return self._engine.open


def _number(name: str, value: Any) -> Number:
    """As a float; of a device it stays there, as it is now, and comes with the step's sums."""
    if isinstance(value, torch.Tensor) and not value.is_cpu and value.numel() == 1 and not value.is_complex():
        return value.detach().reshape(()).to(torch.float64, copy=True)
    try:
        return float(value.detach()) if isinstance(value, torch.Tensor) else float(value)
    except (TypeError, ValueError, RuntimeError):
        shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
        raise ConfigError(
            f"step.record({name}=…) was given a {type(value).__name__}{shape}, and takes one number",
            hint=f"of several numbers record one, such as {name}.mean()",
        ) from None
