"""Checkpoints of a run whose tables' rows are on parameter servers: the rows are in them, and fit the dense state.

Wraps a worker's checkpoints. Rows change while workers train, so not every worker could save the same bytes: the first
member saves everything. Between a step and the next one nobody sends updates: each member says in the ledger that its
own are acknowledged, and the first member, which the next step needs, reads the rows when all have said so. Where each
worker is alone in its view and others go on, rows are read a moment after the dense state.

A state that comes back from storage is put into the model, and each table puts its rows onto the servers
(tables/module.py). Belongs to the thread of the user's loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from holdfast.core.errors import PeerError, ProtocolError
from holdfast.core.words import KEY_DEAD, KEY_ROWS_SENT, decode_whole, encode_json
from holdfast.engine.ledger_feed import LedgerFeed
from holdfast.engine.transfer.checkpointing import NoCheckpoints
from holdfast.engine.transfer.wrapping import WrappedCheckpoints
from holdfast.events import EventLog
from holdfast.membership import messages as m
from holdfast.tables.module import EmbeddingTable

SENT_S = 10.0  # for other members' updates: they are in the same place of their loops
LOOK_S = 0.005


class TableRows(WrappedCheckpoints):
    AS_THEY_ARE = (
        *("is_due", "note", "wait_copied", "member_lost", "arrived", "settle_up_to", "settle", "newest", "close"),
        *("search_at", "is_search_due"),
    )

    def __init__(
        self,
        inner: NoCheckpoints,
        tables: Sequence[EmbeddingTable],
        me: str,
        *,
        feed: LedgerFeed,
        events: EventLog,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(inner)
        self._tables = tuple(tables)
        self._me = me
        self._feed = feed
        self._events = events
        self._clock = clock

    def prepare(self, members: tuple[str, ...]) -> None:
        if members[0] == self._me:
            self._inner.prepare((self._me,))

    def search(self) -> m.Restored | None:
        return self._inner.search()

    # ---- saving

    def save(
        self, step: int, members: tuple[str, ...], metrics: Mapping[str, float], *, mark: int = 0, wanted: bool = False
    ) -> None:
        with self._rows_at(step, members) as why:
            if why is None:
                self._inner.save(step, (self._me,), metrics, mark=mark, wanted=wanted)
            else:
                self._inner.arrived(step)  # this one is not due again

    def save_last(self, step: int, members: tuple[str, ...], metrics: Mapping[str, float]) -> None:
        with self._rows_at(step, members) as why:
            if why is None:
                self._inner.save_last(step, (self._me,), metrics)

    def leave(self, step: int, members: tuple[str, ...], metrics: Mapping[str, float], *, save: bool) -> str:
        if not save:
            return self._inner.leave(step, members, metrics, save=False)
        with self._rows_at(step, members) as why:
            saved = self._inner.leave(step, (self._me,), metrics, save=why is None)
        return why or saved

    @contextmanager
    def _rows_at(self, step: int, members: tuple[str, ...]) -> Iterator[str | None]:
        """None: the tables' state has the rows as they are after `step` steps, in here. Else why this worker saves
        nothing: empty, where another one does."""
        for table in self._tables:
            table.flush()
        if members[:1] != (self._me,):
            self._feed.put(KEY_ROWS_SENT + self._me, encode_json({"step": step}))
            yield ""
            return
        why = None
        try:
            self._wait_for_updates(step, members)
            for table in self._tables:
                table.hold_rows()
        except PeerError as error:
            why = error.message
            self._events.write("warning", text=f"step {step} is not saved: {why}")
        try:
            yield why
        finally:
            for table in self._tables:
                table.let_go_of_rows()

    def _wait_for_updates(self, step: int, members: tuple[str, ...]) -> None:
        """PeerError if somebody who is there does not say that its updates of the step are acknowledged."""
        give_up = self._clock() + SENT_S
        while missing := [one for one in members if one != self._me and not self._is_through(one, step)]:
            if self._clock() > give_up:
                raise PeerError(f"{', '.join(missing)} did not say within {SENT_S:g} s that its rows are sent")
            time.sleep(LOOK_S)

    def _is_through(self, worker: str, step: int) -> bool:
        """It has said so, or it is gone, and what it had not sent with it."""
        if worker not in self._feed.who()[0] or self._feed.entry(KEY_DEAD + worker) is not None:
            return True
        entry = self._feed.entry(KEY_ROWS_SENT + worker)
        try:
            return entry is not None and decode_whole(entry.value, "step") == step
        except ProtocolError:
            return False
