"""A worker's account of its time, kept by what the training thread enters anyway, and told in `spent` events.

Belongs to the thread of the user's loop. What is entered costs two additions; an event is written at most once a
second, and less often the longer the worker lives.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdfast.core import spending as s
from holdfast.core.waits import Wait, WaitKind
from holdfast.detection.beat import Activity
from holdfast.detection.heartbeat import Pulse
from holdfast.engine.transfer.checkpointing import NoCheckpoints
from holdfast.engine.transfer.wrapping import WrappedCheckpoints
from holdfast.events import EventLog
from holdfast.membership import messages as m
from holdfast.membership.phases import Phase

TELL_S_MIN, TELL_S_MAX = 1.0, 10.0
TELL_SHARE = 0.01  # of the worker's life: what is not told yet when it is killed is no more than that
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
# While it waits. In a phase in which the script has the word, it must not begin: the ledger is away for too long.
_OF_PHASE = {
    Phase.WAITING: s.STANDBY,
    Phase.FORMING: s.JOINING,
    Phase.LOADING: s.JOINING,
    Phase.COMPARING: s.JOINING,
    Phase.RECEIVING: s.JOINING,
    Phase.TURNING: s.JOINING,
    Phase.BEHIND: s.RECOVERING,
    Phase.BROKEN: s.JOINING,  # without a loss: the view changes because somebody comes or goes
    Phase.STOPPING: s.WAITING,
    Phase.GATHERING: s.WAITING,
    Phase.REDUCING: s.WAITING,
    Phase.COMPUTING: s.RECOVERING,
    Phase.APPLYING: s.RECOVERING,
    Phase.ENDED: s.SCRIPT,
}


class Spending(Pulse):
    """The pulse of the training thread, with an account of it."""

    def __init__(self, events: EventLog | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(clock)
        self._events = events or EventLog(None, "")
        self._account = s.Account(self.since)
        self.tell_at = self.since + TELL_S_MIN
        self._held: list[str] = []  # what our own lines are in, innermost last
        self.phase, self.broken = Phase.WAITING, False  # of the machine, as of the last look
        self._categories = _categories(self.phase, self.broken)
        self.reduced_bytes = 0

    def enter(self, activity: Activity, step: int) -> None:
        """What it is in already, in this step, it stays in."""
        if activity is not self.activity or step != self.step:
            super().enter(activity, step)
            self._move(self.since)

    @contextmanager
    def during(self, category: str) -> Iterator[None]:
        """Our own lines that the category is about, where they may take long."""
        self._held.append(category)
        now = self.clock()
        self._move(now)
        if category is s.CHECKPOINTING:
            self.wait = Wait(WaitKind.STORAGE, "for a checkpoint to be copied or stored", since=now)
        try:
            yield
        finally:
            if category is s.CHECKPOINTING:
                self.wait = None
            self._held.pop()
            self._move(self.clock())

    def took(self, category: str, began: float) -> None:
        """The same, afterwards: for what every step does. `began` is of the monotonic clock."""
        lost = self.broken and category == s.REDUCING
        self._account.took(s.RECOVERING if lost else category, began, self.clock())

    def look(self, phase: Phase, *, broken: bool) -> None:
        """Where the machine is while it waits. `broken`: a member is lost, and no step has been committed since.

        Needed where one of them is not what it was, or `tell_at` has come. While our own lines say what they are in,
        the phase says nothing of it.
        """
        if not self._held and (phase is not self.phase or broken is not self.broken):
            self.phase, self.broken = phase, broken
            self._categories = _categories(phase, broken)
        self._move(self.clock())

    def go_on(self, *, broken: bool) -> None:
        """The script has the word; what our own lines take until they hand it over is part of the step."""
        if self.phase is not Phase.GATHERING or broken is not self.broken:
            self.phase, self.broken = Phase.GATHERING, broken
            self._categories = _categories(Phase.GATHERING, broken)

    def tell(self) -> None:
        now = self.clock()
        self.tell_at = now + min(TELL_S_MAX, max(TELL_S_MIN, self._account.age(now) * TELL_SHARE))
        seconds = {category: round(spent, 4) for category, spent in self._account.spent(now).items()}
        self._events.write(
            "spent",
            seconds=seconds,
            doing=self._account.doing,
            bytes=self.reduced_bytes,
            memory_bytes=_resident_bytes(),
        )

    def _move(self, now: float) -> None:
        """In the middle of every step, several times: nothing is looked up here that can be known before."""
        category = self._held[-1] if self._held else self._categories[self.activity]
        if category is not self._account.doing:
            self._account.switch(category, now)
        if now >= self.tell_at:
            self.tell()


def _categories(phase: Phase, broken: bool) -> tuple[str, ...]:
    """By activity."""
    in_a_step = {Activity.LOADING: s.LOADING, Activity.SHARD: s.COMPUTING, Activity.SCRIPT: s.COMPUTING}
    inside = {**in_a_step, Activity.WAITING: _OF_PHASE[phase]}
    if broken:
        inside = dict.fromkeys(inside, s.RECOVERING)
    outside = {Activity.STARTING: s.JOINING, Activity.ENDED: s.SCRIPT, Activity.CLOSED: s.SCRIPT}
    return tuple({**inside, **outside}[activity] for activity in Activity)


class HeldUp(WrappedCheckpoints):
    """A worker's checkpoints, with the time that training waits for them on its account."""

    AS_THEY_ARE = ("is_due", "note", "member_lost", "arrived", "newest", "close", "search_at", "is_search_due")
    _ON_ACCOUNT = ("save", "save_last", "settle_up_to", "settle", "leave")

    def __init__(self, inner: NoCheckpoints, spending: Spending) -> None:
        super().__init__(inner)
        self._spending = spending
        self._members: tuple[str, ...] | None = None  # for whom it was last prepared
        vars(self).update({name: self._on_account(getattr(inner, name)) for name in self._ON_ACCOUNT})

    def _on_account(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        def held_up(*arguments: Any, **options: Any) -> Any:
            with self._spending.during(s.CHECKPOINTING):
                return inner(*arguments, **options)

        return held_up

    def prepare(self, members: tuple[str, ...]) -> None:
        if members is self._members:  # before nearly every step, and then there is nothing to prepare
            return
        self._members, began = members, self._spending.clock()
        self._inner.prepare(members)
        self._spending.took(s.CHECKPOINTING, began)

    def wait_copied(self) -> float:
        waited_s = self._inner.wait_copied()
        if waited_s:  # in few steps
            self._spending.took(s.CHECKPOINTING, self._spending.clock() - waited_s)
        return waited_s

    def search(self) -> m.Restored | None:
        now = self._spending.clock()
        self._spending.wait = Wait(WaitKind.STORAGE, "for storage, to look for a checkpoint", since=now)
        return self._inner.search()


def _resident_bytes() -> int:
    """The memory that this process has, what it shares with others included."""
    try:
        return int(Path("/proc/self/statm").read_bytes().split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return 0
