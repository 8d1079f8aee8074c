"""What a worker's slot did over time: a line of stretches, each with a state, however long the run. Pure.

A lane belongs to a slot, so that a dead worker and its replacement are in one line. The number of stretches is
bounded: where there are too many, the shortest are given to their neighbours, since on a screen they have no width
any more. The seconds in each state are counted before that and stay exact.
"""

from __future__ import annotations

from typing import Any, Final

COMPUTING, SLOW, RECOVERING, JOINING = "computing", "slow", "recovering", "joining"
SPARE, PAUSED, DEAD, GONE = "spare", "paused", "dead", "gone"
SERVING = "serving"  # of parameter servers and their slices
STATES: Final = (COMPUTING, SLOW, RECOVERING, JOINING, SPARE, PAUSED, DEAD, GONE, SERVING)
LIVING: Final = frozenset({COMPUTING, SLOW, RECOVERING, JOINING, SPARE, PAUSED})
GOOD: Final = frozenset({COMPUTING, SLOW})
IDLE: Final = frozenset({SPARE, GONE})  # no time of theirs is lost

STRETCHES_MAX = 96
SERVER_STRETCHES_MAX = 40  # of a server's lane, or a slice's
_WEIGHTS: Final = {DEAD: 8.0, RECOVERING: 4.0, JOINING: 2.0}  # these are looked for: they go later than others


class Lane:
    """One slot. `stretches` are (from, state, worker); each lasts until the next, the last one until now.

    `group`: whose it is: workers, servers, or slices, whose worker is the server that leads."""

    __slots__ = ("_counted_from", "_seconds", "changed", "group", "name", "order", "state", "stretches", "worker")

    def __init__(self, name: str, order: tuple[str, int], *, group: str = "workers") -> None:
        self.name = name
        self.group = group
        self.order = order
        self.state = GONE
        self.worker = ""
        self.changed = 0  # the number of the event that last changed it
        self.stretches: list[tuple[float, str, str]] = []
        self._seconds: dict[str, float] = {}
        self._counted_from = 0.0

    def count_from(self, at: float, number: int) -> None:
        """Seconds are counted from here on: what was before, the start of the run, is nobody's loss."""
        self._seconds, self._counted_from, self.changed = {}, at, number

    def move(self, state: str, worker: str, at: float, number: int) -> None:
        """From `at` on the slot's worker is in this state. Clocks differ a little: time never goes back."""
        if state == self.state and worker == self.worker:
            return
        if self.stretches:
            since, was, _ = self.stretches[-1]
            at = max(at, since)
            self._seconds[was] = self._seconds.get(was, 0.0) + max(0.0, at - max(since, self._counted_from))
            self._counted_from = max(at, self._counted_from)
        if self.stretches and self.stretches[-1][0] == at:
            self.stretches.pop()
        if not self.stretches or self.stretches[-1][1:] != (state, worker):
            self.stretches.append((at, state, worker))
        self.state, self.worker, self.changed = state, worker, number
        if len(self.stretches) > self._stretches_max:
            self._coarsen()

    @property
    def _stretches_max(self) -> int:
        return STRETCHES_MAX if self.group == "workers" else SERVER_STRETCHES_MAX

    def seconds(self, now: float) -> dict[str, float]:
        """How long it was in each state, up to now."""
        result = dict(self._seconds)
        if self.stretches:
            since, state, _ = self.stretches[-1]
            result[state] = result.get(state, 0.0) + max(0.0, now - max(since, self._counted_from))
        return result

    def _coarsen(self) -> None:
        """Give a quarter of the stretches to those before them: the shortest, but never the first or the newest."""
        inner = range(1, len(self.stretches) - 8)

        def length(index: int) -> float:
            since, state, _ = self.stretches[index]
            return (self.stretches[index + 1][0] - since) * _WEIGHTS.get(state, 1.0)

        given = set(sorted(inner, key=length)[: self._stretches_max // 4])
        kept: list[tuple[float, str, str]] = []
        for index, stretch in enumerate(self.stretches):
            if index in given or (kept and kept[-1][1:] == stretch[1:]):
                continue
            kept.append(stretch)
        self.stretches = kept

    def _totals(self) -> list[tuple[str, float]]:
        """Of the stretches that are over, and the one that is not: whoever shows it adds the time since."""
        return sorted({self.state: 0.0, **self._seconds}.items())

    def picture(self) -> dict[str, Any]:
        """The state of a stretch is its place in STATES."""
        return {
            "name": self.name,
            "group": self.group,
            "worker": self.worker,
            "state": self.state,
            "seconds": {state: round(seconds, 3) for state, seconds in self._totals()},
            "counted_from": round(self._counted_from, 3),
            "stretches": [[round(at, 3), STATES.index(state), worker] for at, state, worker in self.stretches],
        }
