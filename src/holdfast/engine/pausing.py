"""When a worker does not get on, and why: said once for each reason, in its event log.

Belongs to the thread of the user's loop.
"""

from __future__ import annotations

from holdfast.core.words import host_of
from holdfast.engine.ledger_feed import LedgerFeed
from holdfast.events import EventLog
from holdfast.membership.machine import Machine
from holdfast.membership.view_rules import Patience

SILENT_S = 2.0  # a view change takes less; a worker that has no group for longer says why
EXPECTED_S = 5.0  # the workers of a host do not all come in the same moment
OUTAGE = "the ledger has been away for longer than --outage"


class Pauses:
    """`outage_s` is how long to train on without the ledger; 0: for ever."""

    def __init__(self, feed: LedgerFeed, events: EventLog, *, run: str = "", outage_s: float = 0.0) -> None:
        self._feed = feed
        self._events = events
        self._run = run
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

    def without_group(self, machine: Machine, now: float) -> None:
        """A worker that was a member and has no group: cut off, or the ledger is away. Or one that waits for others who
        may have the training's state. A spare, and one that waits to be taken in, has nothing to say."""
        reason, patience = machine.reason, machine.patience
        if machine.view is None and patience is None:
            return
        if self._since is None:
            self._since = now
        expected = patience is not None and not patience.workers  # new workers, which take a moment to come
        if now - self._since < (EXPECTED_S if expected else SILENT_S):
            return
        if self._feed.down_since is not None:
            reason = f"it cannot reach the ledger, without which no new view can be agreed ({reason})"
            patience = None
        self._say(machine.next, reason, self._how_long(patience) if patience is not None else "")

    def _how_long(self, patience: Patience) -> str:
        """How long at most, and how to cut it short."""
        hosts = sorted({host_of(worker) for worker in patience.workers} - {""})
        if not hosts:
            return f", for {patience.left_s:.0f} s at most"
        return (
            f", for {patience.left_s:.0f} s at most; where that host is gone for good, "
            f"`holdfast give-up {self._run} {' '.join(hosts)}` ends the wait"
        )

    def _say(self, step: int | None, reason: str, how_long: str = "") -> None:
        if reason != self._said:
            self._said = reason
            at = {"step": step} if step is not None else {}
            self._events.write("waiting", **at, reason=reason + how_long)
