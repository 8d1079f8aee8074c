"""Following the ledger through outages: the watch goes on where it was, or everything is read again."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from holdfast.core.errors import LedgerError, LedgerRefused, LedgerUnavailable, WatchGap
from holdfast.ledger.memory import MemoryLedger
from holdfast.ledger.port import Change, Reading
from holdfast.ledger.watching import follow


class Watch:
    def __init__(self, ledger: Ledger, revision: int) -> None:
        self.ledger, self.revision, self.closed = ledger, revision, False
        self.inner = ledger.inner.watch("", revision=revision)

    def next(self, timeout_s: float) -> tuple[Change, ...]:
        self.ledger.turn()
        return self.inner.next(0.0)

    def close(self) -> None:
        self.closed = True


class Ledger:
    """Of a story: what happens at each call for changes, the last of which ends it."""

    def __init__(self, story: Sequence[Exception | str | None], closing: threading.Event) -> None:
        self.inner, self.closing, self.story, self.watches = MemoryLedger(), closing, list(story), list[Watch]()

    def read(self, prefix: str) -> Reading:
        return self.inner.read(prefix)

    def watch(self, prefix: str, *, revision: int) -> Watch:
        self.watches.append(Watch(self, revision))
        return self.watches[-1]

    def turn(self) -> None:
        happens = self.story.pop(0)
        if not self.story:
            self.closing.set()
        if isinstance(happens, Exception):
            raise happens
        if happens is not None:
            self.inner.put(happens, b"1")


def told(*story: Exception | str | None, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], Ledger]:
    monkeypatch.setattr("holdfast.ledger.watching.RETRY_S", 0.0)
    closing, heard = threading.Event(), list[Any]()
    ledger = Ledger(story, closing)
    ledger.inner.put("begun", b"1")
    follow(
        ledger,  # type: ignore[arg-type]
        closing,
        whole=lambda reading: heard.append({entry.key for entry in reading.entries}),
        changed=lambda changes: heard.extend(change.key for change in changes),
        away=lambda error: heard.append(type(error)),
    )
    return heard, ledger


def test_all_comes_first_and_then_what_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    heard, ledger = told("a", None, "b", monkeypatch=monkeypatch)
    assert heard == [{"begun"}, "a", "b"]
    assert [watch.closed for watch in ledger.watches] == [True]


def test_an_outage_costs_nothing_of_what_changed_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    heard, ledger = told("a", LedgerUnavailable("no answer"), "b", monkeypatch=monkeypatch)
    assert heard == [{"begun"}, "a", LedgerUnavailable, "b"] and len(ledger.watches) == 1


@pytest.mark.parametrize("trouble", [WatchGap("too far behind"), LedgerRefused("its disk failed")])
def test_after_any_other_trouble_everything_is_read_again(
    trouble: LedgerError, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard, ledger = told("a", trouble, "b", monkeypatch=monkeypatch)
    assert [one for one in heard if not isinstance(one, type)] == [{"begun"}, "a", {"begun", "a"}, "b"]
    assert (LedgerRefused in heard) == isinstance(trouble, LedgerRefused)
    assert [watch.closed for watch in ledger.watches] == [True, True]


def test_who_is_closing_is_told_of_no_outage(monkeypatch: pytest.MonkeyPatch) -> None:
    heard, _ = told(LedgerUnavailable("closed"), monkeypatch=monkeypatch)
    assert heard == [{"begun"}]
