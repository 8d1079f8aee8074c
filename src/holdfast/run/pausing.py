"""When a worker does not get on, and why: said once for each reason, in its event log.

Belongs to the thread of the user's loop.
"""

from __future__ import annotations

from holdfast.events import EventLog
from holdfast.run.ledger_feed import LedgerFeed

SILENT_S = 2.0  # a view change takes less; a worker that has no group for longer says why
OUTAGE = "the ledger has been away for longer than --outage"


class Pauses:
    """`outage_s` is how long to train on without the ledger; 0: for ever."""

    def __init__(self, feed: LedgerFeed, events: EventLog, *, outage_s: float) -> None:
        self._feed = feed
        self._events = events
        self._outage_s = outage_s
        self._since: float | None = None  # without a group
        self._said = ""

    def ledger_away_too_long(self, step: int, now: float) -> bool:
        """Then no step is begun: others, who reach the ledger, may soon take us all for lost and begin anew."""
        if not self._outage_s or now - self._feed.last_contact < self._outage_s:
            return False
        self._say(step, OUTAGE)
        return True

    def over(self) -> None:
        """There is a group, or something to do."""
        self._since, self._said = None, ""

    def without_group(self, step: int, reason: str, now: float) -> None:
        """A worker that was a member and has no group: cut off, or the ledger is away."""
        if self._since is None:
            self._since = now
        if now - self._since < SILENT_S:
            return
        if self._feed.down_since is not None:
            reason = f"it cannot reach the ledger, without which no new view can be agreed ({reason})"
        self._say(step, reason)

    def _say(self, step: int, reason: str) -> None:
        if reason != self._said:
            self._said = reason
            self._events.write("waiting", step=step, reason=reason)
