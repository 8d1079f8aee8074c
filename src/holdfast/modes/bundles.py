"""The data of a rank whose worker is a group: where the machine deals out shards, each is a bundle of as many as there
are ranks, which compute them side by side, and this rank has one of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from holdfast.data.shards import ShardPlace
from holdfast.modes.port import DataPlan


class Bundles(DataPlan):
    """Of a plan whose steps are whole."""

    def __init__(self, inner: DataPlan, rank: int, ranks: int) -> None:
        self._inner = inner
        self._rank = rank
        self._ranks = ranks

    def leaf_of(self, bundle: int) -> int:
        return bundle * self._ranks + self._rank

    def place(self, step: int, shard: int) -> ShardPlace | None:
        return self._inner.place(step, self.leaf_of(shard))

    def epoch(self, step: int) -> int:
        return self._inner.epoch(step)

    def ends_epoch(self, step: int, shards: Sequence[int] | None = None) -> bool:
        return self._inner.ends_epoch(step)

    def samples(self, step: int, shards: Sequence[int] | None) -> int:
        return self._inner.samples(step, None)

    def first_step(self, epoch: int) -> int | None:
        return self._inner.first_step(epoch)

    def upcoming(
        self, step: int, now: Sequence[int], later: Sequence[int], *, room: int, until: int, passed: Collection[int]
    ) -> Iterator[ShardPlace]:
        mine = tuple(map(self.leaf_of, now)), tuple(map(self.leaf_of, later))
        yield from self._inner.upcoming(step, *mine, room=room * self._ranks, until=until, passed=passed)

    def state(self) -> dict[str, Any]:
        return self._inner.state()

    def load(self, state: Mapping[str, Any]) -> None:
        self._inner.load(state)
