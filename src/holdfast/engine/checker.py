"""What `holdfast check` puts into a run: somebody who has shards computed again, and compares. See script_check/."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from holdfast.data.loader import BatchLoader
from holdfast.data.shards import ShardPlace
from holdfast.modes.capture import Collector
from holdfast.reduce.reduction import Number


class Checker(Protocol):
    """Belongs to the thread of the user's loop."""

    def batch(self, loader: BatchLoader, place: ShardPlace, *, counts: bool) -> Any:
        """The batch of a shard. `counts`: it is computed for the step; else only to be compared."""

    def collector(
        self, shard: int, inner: Collector, metrics: Mapping[str, Mapping[int, Number]], *, counts: bool
    ) -> Collector:
        """Where a shard's tensors go: to `inner` too, if it counts."""

    def again(self, step: int, shards: tuple[int, ...]) -> Iterator[int]:
        """Shards to be computed once more, when all that count are. Asked for the next when one is done."""

    def loaded(self, step: int) -> None:
        """The mean is in `.grad`."""
