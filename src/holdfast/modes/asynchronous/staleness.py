"""How stale updates are: counted, told, and, where that is asked for, weighed by it.

An update is stale by as many updates of others as came between reading the parameters and its own. What the bound of
the mode is about is told beside it: how many rounds of units the update's unit was ahead of the first unfinished one
when it was given out, and how many acknowledged updates the parameters lacked then, which must be none.

With a learning rate that follows it (`adaptive`), an update that was stale by s counts one s-th (Zhang et al., 2016): a
worker knows the staleness of an update when it is acknowledged, so the last one's counts for the next. Belongs to the
training thread.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence

from holdfast.events import EventLog
from holdfast.modes.asynchronous.exchange import Pushed
from holdfast.servers.recipe import Settings

TELL_S = 1.0


class StalenessAccount:
    def __init__(
        self, events: EventLog, *, bound: int | None, adaptive: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._events = events
        self._bound = bound
        self._ahead = self._missing = 0  # at most
        self._adaptive = adaptive
        self._clock = clock
        self._counts: Counter[int] = Counter()  # since it was told
        self._last = 0
        self._told_at = clock()

    def take(self, pushed: Sequence[Pushed]) -> None:
        for one in pushed:
            self._last = one.staleness
            self._counts[self._last] += 1
            self._ahead = max(self._ahead, one.ready.given.ahead)
            self._missing = max(self._missing, one.ready.missing)
        if self._clock() - self._told_at >= TELL_S:
            self.tell()

    def tell(self) -> None:
        if self._counts:
            counts = {str(stale): self._counts[stale] for stale in sorted(self._counts)}
            bound = {"bound": self._bound} if self._bound is not None else {}
            self._events.write("staleness", updates=counts, ahead=self._ahead, missing=self._missing, **bound)
        self._counts, self._ahead, self._missing, self._told_at = Counter(), 0, 0, self._clock()

    def scaled(self, settings: Sequence[Settings]) -> list[Settings]:
        """The groups' settings, with learning rates for an update as stale as the last one was."""
        if not self._adaptive or self._last <= 1:
            return list(settings)
        return [{**one, "lr": rate / self._last} if (rate := _rate(one)) is not None else one for one in settings]


def _rate(settings: Settings) -> float | None:
    rate = settings.get("lr")
    return float(rate) if isinstance(rate, (int, float)) else None
