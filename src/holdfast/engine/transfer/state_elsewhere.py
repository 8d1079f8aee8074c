"""Checkpoints of a run whose state is not with its workers: one of them fetches it and saves it, for all.

Wraps a worker's checkpoints, which keep and find what is in the model and the optimizers. Before they save, the mode
puts the training's state there; and when they are asked for a state, the mode is asked first. Belongs to the thread of
the user's loop.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from holdfast.core.errors import PeerError
from holdfast.engine.transfer.checkpointing import SEARCH_AGAIN_S, NoCheckpoints
from holdfast.engine.transfer.wrapping import WrappedCheckpoints
from holdfast.events import EventLog
from holdfast.membership import messages as m
from holdfast.modes.port import Attendance

SAVE_AGAIN_S = 10.0  # after a state that could not be had


class StateElsewhere(WrappedCheckpoints):
    keeps = True  # whoever has no state finds it where the mode knows

    AS_THEY_ARE = ("note", "prepare", "wait_copied", "member_lost", "arrived", "settle_up_to", "newest", "close")

    def __init__(self, inner: NoCheckpoints, attendance: Attendance, me: str, events: EventLog) -> None:
        super().__init__(inner)
        self._attendance = attendance
        self._me = me
        self._events = events
        self._failed_at = -SAVE_AGAIN_S
        self._unsaved: tuple[int, str] | None = None  # the last state of a loop that could not be had, and why
        self._search_at: float | None = None

    @property
    def _leads(self) -> bool:
        """One worker saves for all: the one that has been here for the longest."""
        return self._attendance.workers((self._me,))[:1] == (self._me,)

    def is_due(self, step: int, *, first: bool) -> bool:
        if time.monotonic() - self._failed_at < SAVE_AGAIN_S:
            return False
        return self._inner.is_due(step, first=first and self._leads) and self._leads

    def _collect(self, step: int) -> str:
        """Have the training's state in the model. Why it is not to be had: then this is not saved, and steps go on."""
        try:
            self._attendance.collect()
        except PeerError as error:
            self._failed_at = time.monotonic()
            self._events.write("warning", text=f"step {step} is not saved: {error.message}")
            return error.message
        return ""

    def save(
        self, step: int, members: tuple[str, ...], metrics: Mapping[str, float], *, mark: int = 0, wanted: bool = False
    ) -> None:
        if self._inner.keeps and self._leads and not self._collect(step):
            self._inner.save(step, members, metrics, mark=mark, wanted=wanted)
            self._inner.wait_copied()  # the next step may begin with other parameters at any moment

    def save_last(self, step: int, members: tuple[str, ...], metrics: Mapping[str, float]) -> None:
        if self._inner.keeps and self._leads:
            why = self._collect(step)
            self._unsaved = (step, why) if why else None
            if not why:
                self._inner.save_last(step, members, metrics)

    def settle(self, step: int) -> str:
        if self._unsaved is not None and self._unsaved[0] == step:
            return self._unsaved[1]
        return self._inner.settle(step)

    def leave(self, step: int, members: tuple[str, ...], metrics: Mapping[str, float], *, save: bool) -> str:
        save = save and self._leads
        if save and self._inner.keeps and (why := self._collect(step)):
            return why
        return self._inner.leave(step, members, metrics, save=save)

    def search_at(self, when: float | None) -> None:
        self._search_at = when

    def is_search_due(self, now: float) -> bool:
        return self._search_at is not None and now >= self._search_at

    def search(self) -> m.Restored | None:
        self._search_at = None
        return m.Restored(self._attendance.arrives(self._in_storage))

    def _in_storage(self) -> int | None:
        """What the checkpoints find. While storage is down there is no other way than to wait for it."""
        if not self._inner.keeps:
            return None
        while (found := self._inner.search()) is None:
            time.sleep(SEARCH_AGAIN_S)
        return found.step
