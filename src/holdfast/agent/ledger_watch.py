"""Follows the run's ledger for the agent: a thread that turns its changes into messages."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.core.errors import LedgerError
from holdfast.ledger.port import Change, Ledger, Reading
from holdfast.ledger.watching import WAIT_S, follow


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
        follow(
            self._ledger,
            self._closing,
            whole=self._post_contents,
            changed=self._post_changes,
            away=self._note_away,
            back=self._note_back,
        )

    def _post_contents(self, reading: Reading) -> None:
        self._post(LedgerContents({entry.key: entry.value for entry in reading.entries}))

    def _post_changes(self, changes: Sequence[Change]) -> None:
        for change in changes:
            self._post(LedgerChange(change))

    def _note_away(self, error: LedgerError) -> None:
        if self._down_since is None:
            self._down_since = time.monotonic()
            self._post(LedgerAway(error.message))

    def _note_back(self) -> None:
        if self._down_since is not None:
            self._post(LedgerBack(time.monotonic() - self._down_since))
            self._down_since = None
