"""Following the ledger: all that stands in it, then every change, through outages. For a thread of its own.

Whoever follows is told in this order: `back` whenever the ledger answers, `whole` at the start and again after changes
were missed, `changed` with what came since, `away` whenever it does not answer. While it is only not to be reached the
watch goes on where it was; after any other trouble everything is read again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from holdfast.core.errors import LedgerError, LedgerUnavailable, WatchGap
from holdfast.ledger.port import Change, Ledger, Reading, Watch

WAIT_S = 1.0  # for changes, before it is looked whether to end
RETRY_S = 0.1


class Closing(Protocol):
    """An event, as threading has it."""

    def is_set(self) -> bool: ...

    def wait(self, timeout: float) -> Any: ...


def follow(
    ledger: Ledger,
    closing: Closing,
    *,
    whole: Callable[[Reading], None],
    changed: Callable[[Sequence[Change]], None],
    away: Callable[[LedgerError], None] = lambda error: None,
    back: Callable[[], None] = lambda: None,
) -> None:
    """Until `closing` is set, which is noticed at once if the ledger is closed then."""
    watch: Watch | None = None
    while not closing.is_set():
        try:
            if watch is None:
                reading = ledger.read("")
                back()
                whole(reading)
                watch = ledger.watch("", revision=reading.revision)
            changes = watch.next(WAIT_S)
            back()
            if changes:
                changed(changes)
        except WatchGap:
            _close(watch)
            watch = None
        except LedgerError as error:
            if not isinstance(error, LedgerUnavailable):
                _close(watch)
                watch = None
            if not closing.is_set():
                away(error)
                closing.wait(RETRY_S)
    _close(watch)


def _close(watch: Watch | None) -> None:
    if watch is not None:
        watch.close()
