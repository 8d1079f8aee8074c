"""How a worker leaves: what is saved first, what is said, and which exception its script is told by.

Belongs to the thread of the user's loop. A worker leaves once; whoever asks it for more is told the same again.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from holdfast.core.errors import EXIT_STOPPED, Evicted, Stopped, Unsaved
from holdfast.engine.lines import Lines
from holdfast.engine.recovery.auditing import Audits
from holdfast.engine.recovery.rewinding import Rewinding
from holdfast.engine.transfer.checkpointing import NoCheckpoints
from holdfast.events import EventLog
from holdfast.membership import messages as m
from holdfast.membership.machine import Machine

SIGINT = int(signal.SIGINT)


@dataclass(frozen=True)
class LeaveRequested:
    """A signal has come. `number`: which, where nobody but this worker is there to answer it."""

    number: int = 0


def say_unsaved(events: EventLog, checkpoints: NoCheckpoints, step: int | None, why: str) -> Unsaved:
    saved, uri = checkpoints.newest()
    events.write("unsaved", step=step, reason=why, uri=uri, **({"saved": saved} if saved is not None else {}))
    return Unsaved(why)


class Leaving:
    """`save_now(step, save=...)`: save the state of that step where it is due; why it is not saved, or nothing.

    `settle`: have what this worker has under way elsewhere done, before the ledger says that it is gone.
    """

    def __init__(
        self,
        machine: Machine,
        lines: Lines,
        *,
        checkpoints: NoCheckpoints,
        audits: Audits,
        rewinding: Rewinding,
        save_now: Callable[..., str],
        settle: Callable[[], None],
    ) -> None:
        self.over: BaseException | None = None  # the worker has left, and this was raised then
        self.asked_by = 0  # the signal that asked for it, where nobody but this worker is there to answer it
        self._machine = machine
        self._lines = lines
        self._checkpoints = checkpoints
        self._audits = audits
        self._rewinding = rewinding
        self._save_now = save_now
        self._settle = settle

    def raise_if_over(self) -> None:
        """A script that has caught its worker's end, and goes on as if there were steps to come, hears it again."""
        if self.over is not None:
            raise self.over

    def leave(self, end: m.End) -> NoReturn:
        self.raise_if_over()
        try:
            if end.kind == "evicted":
                self._be_evicted(end.reason)
            if end.kind == "rewind" and (found := self._audits.found) is not None:
                self._rewind(found.good or 0, (), end.reason, **self._audits.asked_of_rewind())
            self._audits.end(end)
            self._leave_in_order(end)
        except BaseException as error:
            self.over = error
            raise

    def rewind(self, *, back_to: int, passed: tuple[int, ...], reason: str, **more: Any) -> NoReturn:
        """The run goes back, and this worker ends: see rewinding.py, whose `ask` takes the same."""
        self.raise_if_over()
        try:
            self._rewind(back_to, passed, reason, **more)
        except Evicted as error:
            self.over = error
            raise

    def _rewind(self, back_to: int, passed: tuple[int, ...], reason: str, **more: Any) -> NoReturn:
        self._checkpoints.settle_up_to(back_to)
        try:
            self._rewinding.ask(back_to=back_to, passed=passed, reason=reason, **more)
        except Evicted as end:
            self._be_evicted(end.reason)

    def _be_evicted(self, reason: str) -> NoReturn:
        self._lines.events.write("evicted", view=self._machine._number(), reason=reason)
        raise Evicted(reason)

    def _leave_in_order(self, end: m.End) -> NoReturn:
        """Between two steps: save where it is due, say so, and end the script's loop."""
        step, events = self._machine.next, self._lines.events
        why = self._save_now(step, save=end.save) if step is not None else ""
        try:
            if why:
                raise say_unsaved(events, self._checkpoints, step, why)
            saved, uri = self._checkpoints.newest()
            where = {"uri": uri} if step is not None and saved == step else {}
            events.write("left", step=step, reason=end.reason, **where)
        finally:
            self._settle()  # first: servers refuse updates of a worker that is gone, one sooner than another
            self._lines.feed.deregister()
        if self.asked_by == SIGINT:
            raise KeyboardInterrupt  # as Python has it, for a script that has lines for it; only, the step is whole
        raise Stopped(end.reason, 128 + self.asked_by if self.asked_by else EXIT_STOPPED)
