"""A worker's line to the ledger when answers are lost: it must know its lease, keep it, and be registered once."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.errors import LedgerUnavailable
from holdfast.core.words import KEY_DONE, KEY_ROLLS, KEY_VIEW, KEY_WORKERS, Registration, View
from holdfast.engine.ledger_feed import LedgerFeed, LedgerNews
from holdfast.events import EventLog, read_events
from holdfast.ledger.memory import MemoryLedger
from holdfast.membership.reach import Roll
from holdfast.net.mailbox import Mailbox

LEASE_S = 1.0
ME = Registration(id="w0.1", host="", pid=1, pid_started=1, address="unix:/nowhere", fingerprint="x")
KEY = KEY_WORKERS + ME.id


class LossyLedger:
    """Carries out what it is asked, and loses the answers to the next `losses[method]` calls. Counts all calls."""

    def __init__(self, ledger: MemoryLedger) -> None:
        self._ledger = ledger
        self.losses: dict[str, int] = {}
        self.calls: list[str] = []
        self.leases: list[int] = []

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._ledger, name)

        def call(*arguments: Any, **options: Any) -> Any:
            result = method(*arguments, **options)
            self.calls.append(name)
            if name == "grant":
                self.leases.append(result)
            if self.losses.get(name, 0) > 0:
                self.losses[name] -= 1
                raise LedgerUnavailable("the answer was lost")
            return result

        return call


class Setting:
    def __init__(self, directory: Path) -> None:
        self.ledger = MemoryLedger()
        self.lossy = LossyLedger(self.ledger.another())
        self.mailbox = Mailbox()
        self.events = directory / "w0.1.jsonl"
        self.log = EventLog(self.events, ME.id)
        self.feed = LedgerFeed(self.lossy, ME, self.mailbox, self.log, lease_s=LEASE_S)  # type: ignore[arg-type]

    def registrations(self) -> int:
        return sum(event["kind"] == "registered" for event in read_events(self.events.parent))

    def ask_until(self, done: Callable[[], bool]) -> None:
        """Register as the machine does: again and again while the registration is not there."""
        until(lambda: self.feed.register() or done())


def until(condition: Callable[[], bool], *, within_s: float = 10.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.02)


def stays(condition: Callable[[], bool], *, for_s: float) -> None:
    deadline = time.monotonic() + for_s
    while time.monotonic() < deadline:
        assert condition()
        time.sleep(0.02)


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[Setting]:
    made = Setting(tmp_path)
    yield made
    made.feed.close()
    made.log.close()
    os.close(made.mailbox.fd)


@pytest.mark.parametrize(("lost", "times"), [("grant", 3), ("compare_and_set", 1), ("get", 3), ("keep_alive", 3)])
def test_a_registration_whose_answers_are_lost_stands_under_a_lease_that_is_kept(
    setting: Setting, lost: str, times: int
) -> None:
    setting.lossy.losses[lost] = times
    setting.feed.start()

    def stands() -> bool:
        entry = setting.ledger.get(KEY)
        return entry is not None and setting.registrations() == 1 and setting.lossy.losses[lost] == 0

    setting.ask_until(stands)
    # Whichever leases were granted and lost: the registration outlives them all.
    stays(lambda: setting.ledger.get(KEY) is not None, for_s=2.5 * LEASE_S)
    assert setting.registrations() == 1
    assert setting.lossy.calls.count("compare_and_set") == 1  # what was carried out is found, not done again
    setting.feed.deregister()
    until(lambda: setting.ledger.get(KEY) is None)


def test_a_registration_under_a_lease_that_was_given_up_is_taken_over(setting: Setting) -> None:
    former = setting.ledger.grant(30.0)
    setting.ledger.put(KEY, ME.encode(), lease=former)
    created = setting.ledger.get(KEY)
    assert created is not None
    setting.feed.start()
    setting.ask_until(lambda: setting.registrations() == 1)
    entry = setting.ledger.get(KEY)
    assert entry is not None and entry.lease != former and entry.created == created.created
    setting.ledger.revoke(former)
    assert setting.ledger.get(KEY) is not None


def test_a_lease_that_is_lost_while_the_worker_lives_leads_to_another(setting: Setting) -> None:
    setting.feed.start()
    setting.ask_until(lambda: setting.registrations() == 1)
    first = setting.ledger.get(KEY)
    assert first is not None
    setting.ledger.revoke(first.lease)
    assert setting.ledger.get(KEY) is None
    setting.ask_until(lambda: setting.registrations() == 2)
    second = setting.ledger.get(KEY)
    assert second is not None and second.lease != first.lease


def test_a_member_is_registered_only_while_the_view_that_it_knows_stands(setting: Setting) -> None:
    known = setting.ledger.put(KEY_VIEW, View(1, (ME.id, "w1.1")).encode())
    newer = setting.ledger.put(KEY_VIEW, View(2, ("w1.1",)).encode())
    setting.feed.start()
    setting.feed.register(known)
    until(lambda: "compare_and_set" in setting.lossy.calls)
    stays(lambda: setting.ledger.get(KEY) is None and setting.registrations() == 0, for_s=0.2)
    setting.feed.register(newer)
    until(lambda: setting.registrations() == 1)
    entry = setting.ledger.get(KEY)
    assert entry is not None and setting.lossy.leases == [entry.lease]  # the lease of the first try is of use still


def test_after_an_unknown_outcome_of_a_proposal_the_watch_tells_what_holds(setting: Setting) -> None:
    setting.lossy.losses["compare_and_set"] = 1
    setting.feed.start()
    view = View(1, ("w0.1",), "the run starts")
    setting.feed.propose(view, 0)
    seen: list[LedgerNews] = []
    until(lambda: seen.extend(setting.mailbox.take_all()) or any(news.state.view == view for news in seen))
    setting.feed.propose(View(1, ("w9.9",)), 0)  # sent again by someone who does not know: it does not apply twice
    until(lambda: setting.lossy.calls.count("compare_and_set") == 2)
    entry = setting.ledger.get(KEY_VIEW)
    assert entry is not None and View.decode(entry.value) == view


def test_a_roll_lives_as_long_as_the_registration(setting: Setting) -> None:
    roll = Roll(3, ("w1.1",), ("w2.1",), True)
    setting.feed.start()
    setting.ask_until(lambda: setting.registrations() == 1)
    setting.feed.publish(roll)
    seen: list[LedgerNews] = []
    until(lambda: seen.extend(setting.mailbox.take_all()) or any(n.state.rolls == {ME.id: roll} for n in seen))
    setting.feed.deregister()
    until(lambda: setting.ledger.get(KEY_ROLLS + ME.id) is None and setting.ledger.get(KEY) is None)


def test_of_commands_that_wait_only_the_latest_of_a_kind_is_carried_out(setting: Setting) -> None:
    """A machine asks again every second; a ledger that was away for an hour must not be asked everything again."""
    for number in range(1, 50):
        setting.feed.propose(View(number, ("w0.1",)), 0)
    setting.feed.start()
    until(lambda: setting.ledger.get(KEY_VIEW) is not None)
    entry = setting.ledger.get(KEY_VIEW)
    assert entry is not None and View.decode(entry.value).number == 49
    assert setting.lossy.calls.count("compare_and_set") == 1


def test_a_slow_ledger_does_not_cost_the_lease(setting: Setting) -> None:
    """Commands that each take long must not keep the lease from being renewed in between."""
    setting.feed.start()
    setting.ask_until(lambda: setting.registrations() == 1)
    busy = threading.Event()

    def put(*arguments: Any, **options: Any) -> int:
        busy.wait(LEASE_S / 2)
        return 1

    setting.lossy.put = put  # type: ignore[attr-defined]
    for number in range(20):
        setting.feed.put(f"note/{number}", b"")
    stays(lambda: setting.ledger.get(KEY) is not None, for_s=3 * LEASE_S)
    busy.set()


def test_a_worker_without_an_agent_stays_until_the_ledger_says_that_it_has_finished(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setting.feed, "_outage_s", 30.0)
    monkeypatch.setattr(setting.feed, "_parent", -1)
    away = threading.Event()
    away.set()

    def put(key: str, value: bytes) -> int:
        if away.is_set():
            raise LedgerUnavailable("it is away")
        return setting.ledger.put(key, value)

    setting.lossy.put = put  # type: ignore[attr-defined]
    setting.feed.start()
    setting.feed.put_at_last(KEY_DONE, b"{}")
    closing = threading.Thread(target=setting.feed.close)
    closing.start()
    closing.join(3.0)  # longer than a worker with an agent stays
    assert closing.is_alive()
    away.clear()
    closing.join(10.0)
    assert not closing.is_alive()
    assert setting.ledger.get(KEY_DONE) is not None
