"""Follows the run's ledger for the agent: a thread that turns its changes into messages."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from holdfast.core.errors import LedgerError, WatchGap
from holdfast.ledger.port import Change, Ledger

WAIT_S = 1.0


@dataclass(frozen=True)
class LedgerContents:
    """All keys as they stand: at the start, and again after changes were missed."""

    values: dict[str, bytes]


@dataclass(frozen=True)
class LedgerChange:
    change: Change


@dataclass(frozen=True)
class LedgerAway:
    """It does not answer: the membership is frozen until it does."""

    reason: str


@dataclass(frozen=True)
class LedgerBack:
    down_s: float


News = LedgerContents | LedgerChange | LedgerAway | LedgerBack


class LedgerWatch:
    """Posts one LedgerContents, then every LedgerChange; and says when the ledger goes away and comes back.

    Owns `ledger`, which nobody else uses.
    """

    def __init__(self, ledger: Ledger, post: Callable[[News], None]) -> None:
        self._ledger = ledger
        self._post = post
        self._down_since: float | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-ledger-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._ledger.close()  # wakes the thread
        self._thread.join(timeout=2 * WAIT_S)

    def _run(self) -> None:
        while not self._closing.is_set():
            try:
                self._follow()
            except WatchGap:
                pass  # begin again from the state
            except LedgerError as error:
                self._note_away(error)
                self._closing.wait(0.1)

    def _follow(self) -> None:
        reading = self._ledger.read("")
        self._note_back()
        self._post(LedgerContents({entry.key: entry.value for entry in reading.entries}))
        watch = self._ledger.watch("", revision=reading.revision)
        try:
            while not self._closing.is_set():
                try:
                    changes = watch.next(WAIT_S)
                except WatchGap:
                    raise
                except LedgerError as error:
                    self._note_away(error)
                    self._closing.wait(0.1)
                    continue
                self._note_back()
                for change in changes:
                    self._post(LedgerChange(change))
        finally:
            watch.close()

    def _note_away(self, error: LedgerError) -> None:
        if self._down_since is None and not self._closing.is_set():
            self._down_since = time.monotonic()
            self._post(LedgerAway(error.message))

    def _note_back(self) -> None:
        if self._down_since is not None:
            self._post(LedgerBack(time.monotonic() - self._down_since))
            self._down_since = None
