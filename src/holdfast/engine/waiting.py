"""A worker that waits says for what, in its heartbeat, and does not wait in vain when it was asked to leave.

Belongs to the thread of the user's loop. What a machine waits for is decided in membership/waiting.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from holdfast.core.waits import Wait, WaitKind
from holdfast.detection.heartbeat import Pulse
from holdfast.engine.ledger_feed import LedgerFeed
from holdfast.membership import messages as m
from holdfast.membership.machine import Machine
from holdfast.membership.waiting import left_in_vain, names, wait_of

FOR_THE_LEDGER = "for the ledger, which has been away for longer than --outage"


class Waiting:
    def __init__(self, machine: Machine, feed: LedgerFeed, pulse: Pulse) -> None:
        self._machine = machine
        self._feed = feed
        self._pulse = pulse
        self._asked_at: float | None = None
        self._outside: Wait | None = None

    def say(self, *, paused: bool) -> None:
        """Nothing has come for a moment. `paused`: there is something to do, and the ledger is away for too long."""
        if self._outside is not None:
            self._pulse.wait = self._outside
            return
        wait = wait_of(self._machine)
        if paused:
            wait = Wait(WaitKind.LEDGER, FOR_THE_LEDGER, since=wait.since)
        elif wait.kind is WaitKind.VIEW and self._feed.down_since is not None:
            wait = replace(wait, kind=WaitKind.LEDGER, why=f"for the ledger, {wait.why}")
        self._pulse.wait = wait

    def outside_steps(self, what: str, whom: Sequence[str]) -> None:
        """The script's lines wait for something. `whom`: only these can end it; nobody: it ends by itself."""
        wait = Wait(WaitKind.PEERS if whom else WaitKind.VIEW, f"for {what}", tuple(whom), self._pulse.clock())
        known = self._outside
        if known is None or (known.why, known.whom) != (wait.why, wait.whom):
            self._outside = wait

    def inside_steps(self) -> None:
        self._outside = None

    def say_fetching(self, sources: Sequence[str]) -> None:
        self._pulse.wait = Wait(WaitKind.STATE, f"for the state, from {names(sources)}", since=self._pulse.clock())

    def over(self) -> None:
        self._pulse.wait = None

    def in_vain(self, now: float, *, save: bool) -> m.End | None:
        """How it ends, if it was asked to and what it waits for does not come. `save`: its state may be saved."""
        if not (self._machine.leave_asked or self._machine.ledger.stop):
            return None
        if self._asked_at is None:
            self._asked_at = now
        end = left_in_vain(self._machine, self._asked_at, now)
        return end if end is None or save else replace(end, save=False)
