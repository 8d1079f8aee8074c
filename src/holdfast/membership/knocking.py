"""Knocking: when a worker last tried whom it can reach, what came of it, and when to try again. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.membership.messages import Knock, Knocked
from holdfast.membership.view_rules import Timing

LOST_FACTOR = 3  # an answer that is this many times overdue will not come


class Knocking:
    """Belongs to a machine. The answer to a knock that is not the last one is not listened to."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._number = 0
        self._asked_at: float | None = None
        self._failures = 0
        self.answered_at: float | None = None
        self.reached: tuple[str, ...] = ()
        self.missed: tuple[str, ...] = ()

    @property
    def pending(self) -> bool:
        return self._asked_at is not None

    def ask(self, peers: Sequence[str], now: float, *, every_s: float) -> list[Knock]:
        """Knock if it is time to: nothing is under way, and the last answer is `every_s` old."""
        if self._asked_at is not None:
            if now - self._asked_at < LOST_FACTOR * self._timing.knock_s:
                return []
        elif self.answered_at is not None and now - self.answered_at < every_s:
            return []
        self._number += 1
        self._asked_at = now
        return [Knock(self._number, tuple(peers), self._timing.knock_s)]

    def answer(self, event: Knocked, now: float) -> bool:
        if event.number != self._number or self._asked_at is None:
            return False
        self._asked_at = None
        self.answered_at = now
        self.reached, self.missed = event.reached, event.missed
        self._failures = self._failures + 1 if event.missed else 0
        return True

    @property
    def patience_s(self) -> float:
        """How long one outside waits before it knocks again: longer each time that somebody did not answer."""
        return min(self._timing.propose_again_s * (1 << min(self._failures, 16)), self._timing.knock_again_s_max)

    def answered_since(self, when: float) -> bool:
        return self.answered_at is not None and self.answered_at >= when and not self.pending
