"""What a loss costs this worker: the time from the break to the next commit, and the shards that it computes again."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.events import EventLog


class Repair:
    def __init__(self, events: EventLog, clock: Callable[[], float]) -> None:
        self._events = events
        self._clock = clock
        self._broken_at: float | None = None
        self._recomputed = 0

    @property
    def is_under_way(self) -> bool:
        return self._broken_at is not None

    def begin(self) -> None:
        self._broken_at = self._clock()

    def computing(self, shards: int) -> None:
        if self.is_under_way:
            self._recomputed += shards

    def committed(self, view: int, step: int) -> None:
        if self._broken_at is None:
            return
        duration_s = round(self._clock() - self._broken_at, 4)
        about = {"view": view, "step": step, "duration_s": duration_s}
        self._events.write("recovered", **about, recomputed_shards=self._recomputed)
        self._broken_at, self._recomputed = None, 0
