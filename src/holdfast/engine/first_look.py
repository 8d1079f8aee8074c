"""The first member of a run computes one shard of an early step again: a script that gives other bits each time cannot
be exact, and all members agree on what came of it, so that no comparison of states would ever tell.

Belongs to the thread of the user's loop. It costs a shard or two, once. `holdfast check` looks at far more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from holdfast.data.loader import BatchLoader
from holdfast.data.shards import ShardPlace
from holdfast.engine.recovery.shard_digests import shard_digest
from holdfast.events import EventLog
from holdfast.membership.machine import Machine
from holdfast.membership.suspecting import SAME_BITS
from holdfast.modes.capture import Collector
from holdfast.reduce.reduction import Number

FROM_STEP = 1  # in the very first, much that comes to stay is not there yet
TIMES = 3  # a processor that was wrong once gives the same bits in two of them
REASON = "shard {} of step {} gave other gradients each of the {} times that {} computed it"
HINT = f"{SAME_BITS}; `holdfast check` says more"


class FirstLook:
    """A Checker: see checker.py. Metrics are not looked at: many record how long something took."""

    def __init__(self, machine: Machine, events: EventLog) -> None:
        self._machine = machine
        self._events = events
        self._over = False
        self._digests: dict[int, str] = {}  # of the shards of this step that count
        self._again: list[str] = []  # of the one that is looked at, once it is
        self._looked_at: int | None = None

    def batch(self, loader: BatchLoader, place: ShardPlace, *, counts: bool) -> Any:
        return loader.get(*place)

    def collector(
        self, shard: int, inner: Collector, metrics: Mapping[str, Mapping[int, Number]], *, counts: bool
    ) -> Collector:
        if self._looked_at == shard and not counts:
            return _Digesting(None, self._again.append)
        if self._over or not counts or not self._is_due() or self._digests.keys() - {shard}:
            return inner
        return _Digesting(inner, lambda digest: self._digests.update({shard: digest}))

    def again(self, step: int, shards: tuple[int, ...]) -> Iterator[int]:
        digests, self._digests = self._digests, {}
        if self._over or not self._is_due() or not digests:
            return
        self._over = True
        ((shard, first),) = digests.items()
        self._looked_at, self._again = shard, [first]
        for number in range(2, TIMES + 1):
            yield shard
            if len(set(self._again)) < number:
                break  # the same bits twice
        else:
            reason = REASON.format(shard, step, TIMES, self._machine.me)
            self._events.write("inexact", step=step, reason=reason, hint=HINT)
        self._looked_at = None

    def loaded(self, step: int) -> None:
        pass

    def _is_due(self) -> bool:
        view = self._machine.view
        first = view is not None and view.members[0] == self._machine.me and len(view.members) > 1
        return first and (self._machine.next or 0) >= FROM_STEP


class _Digesting:
    """Takes the digest of what a shard leaves behind, and passes it on if it counts."""

    def __init__(self, inner: Collector | None, note: Callable[[str], None]) -> None:
        self._inner = inner
        self._note = note

    def add(self, shard: int, tensors: Sequence[torch.Tensor | None], present: Iterable[int]) -> None:
        present = list(present)
        self._note(shard_digest(tensors, present, {}))
        if self._inner is not None:
            self._inner.add(shard, tensors, present)
