"""The ShardPlan and the loader of an iterable: what they say and give is of the step that is under way.

Which samples a shard has follows from what was read, and no longer from the step's number. Owns nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from holdfast.core.errors import ConfigError
from holdfast.core.kinds import a_kind
from holdfast.data.alignment import align_batch
from holdfast.data.fetching import ShardFetcher
from holdfast.data.iterables.handed import HandedBatches
from holdfast.data.shards import ShardPlace, ShardPlan


@dataclass(frozen=True)
class HandedPlan(ShardPlan):
    """`batch_size` is that of the run's settings; where the iterable gives batches, each has its own."""

    comes_in_batches: bool = False

    def validate(self) -> HandedPlan:
        return self

    @property
    def batches(self) -> HandedBatches:
        assert self.handed is not None
        return self.handed

    def samples_in(self, step: int) -> int:
        return sum(self.batches.step().sizes)

    def weight(self, step: int, shard: int) -> float:
        return self.batches.step().weight(shard)


class HandedLoader:
    """Makes batches of the samples that were handed to this worker. Nothing is fetched ahead: it is all here."""

    def __init__(self, plan: HandedPlan, collate_fn: Callable[[list[Any]], Any] | None, *, collates: bool) -> None:
        if collate_fn is not None and not callable(collate_fn):
            raise ConfigError(
                f"collate_fn is {a_kind(collate_fn)}, not a function", hint="give a function from samples to a batch"
            )
        self._plan = plan
        self._collate = collate_fn if collates else (lambda parts: parts[0])
        self._collates = collates

    def expect(self, upcoming: Iterable[ShardPlace]) -> None:
        """There is nothing to do beforehand."""

    def get(self, step: int, shard: int) -> Any:
        """The batch of a shard of the step that is under way."""
        return self.get_here(step, shard)

    def get_here(self, step: int, shard: int, change: Callable[[Any], Any] = lambda batch: batch) -> Any:
        part = self._plan.batches.samples(shard)
        samples = part if self._collates else [part]
        fetcher = ShardFetcher(samples, self._plan.seed, self._collate)
        return align_batch(change(fetcher.fetch(step, shard, list(range(len(samples))))))

    def close(self) -> None:
        self._plan.batches.close()
