"""What every ledger must do. An implementation runs all of it by deriving from LedgerContract:

    class TestEmbedded(LedgerContract):
        @pytest.fixture
        def factory(self, ...): ...        # a LedgerFactory on an empty ledger

Nothing here assumes that revisions are dense, that several deletions by one lease have revisions of their own, or
that leases are finer than `ttl_granularity_s`.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Protocol

import pytest

from holdfast.core.errors import LeaseGone, LedgerRefused, LedgerUnavailable
from holdfast.ledger.port import KEY_BYTES_MAX, VALUE_BYTES_MAX, Change, Ledger, Watch

WAIT_S = 10.0  # for what should take milliseconds, on a machine that is busy


class LedgerFactory(Protocol):
    ttl_granularity_s: float  # leases are rounded up to a multiple of this
    expiry_slack_s: float  # how long after its time to live a lease may end

    def open(self) -> Ledger:
        """Another client of the same ledger, which was empty at the start of the test."""


def collect(watch: Watch, enough: Callable[[list[Change]], bool]) -> list[Change]:
    """Changes from `watch` until there are enough."""
    changes: list[Change] = []
    deadline = time.monotonic() + WAIT_S
    while not enough(changes):
        left_s = deadline - time.monotonic()
        assert left_s > 0, f"only {len(changes)} changes came: {changes[-3:]}"
        changes += watch.next(left_s)
    return changes


def count(number: int) -> Callable[[list[Change]], bool]:
    return lambda changes: len(changes) >= number


class LedgerContract:
    @pytest.fixture
    def factory(self) -> LedgerFactory:
        raise NotImplementedError

    @pytest.fixture
    def ledger(self, factory: LedgerFactory) -> Iterator[Ledger]:
        with closing(factory.open()) as ledger:
            yield ledger

    @pytest.fixture
    def other(self, factory: LedgerFactory) -> Iterator[Ledger]:
        with closing(factory.open()) as ledger:
            yield ledger

    @pytest.fixture
    def ttl_s(self, factory: LedgerFactory) -> float:
        grain = factory.ttl_granularity_s
        return math.ceil(0.4 / grain) * grain

    # -- keys

    def test_what_is_put_can_be_got(self, ledger: Ledger, other: Ledger) -> None:
        revision = ledger.put("a", b"\x00\xff value")
        entry = other.get("a")
        assert entry is not None
        assert (entry.key, entry.value, entry.lease) == ("a", b"\x00\xff value", 0)
        assert entry.revision == entry.created == revision

    def test_a_key_that_is_not_there_is_none(self, ledger: Ledger) -> None:
        assert ledger.get("nothing") is None

    def test_revisions_grow_and_creation_stays(self, ledger: Ledger) -> None:
        first = ledger.put("a", b"1")
        between = ledger.put("b", b"")
        second = ledger.put("a", b"2")
        assert 0 < first < between < second
        entry = ledger.get("a")
        assert entry is not None
        assert (entry.value, entry.revision, entry.created) == (b"2", second, first)

    def test_delete_says_whether_there_was_something(self, ledger: Ledger) -> None:
        first = ledger.put("a", b"1")
        assert ledger.delete("a") is True
        assert ledger.delete("a") is False
        assert ledger.get("a") is None
        again = ledger.put("a", b"2")
        entry = ledger.get("a")
        assert entry is not None
        assert entry.created == again > first

    def test_a_reading_is_sorted_and_under_the_prefix_only(self, ledger: Ledger, other: Ledger) -> None:
        for key in ("worker/b", "worker/a", "workers", "view", "worker/é"):
            last = ledger.put(key, key.encode())
        reading = other.read("worker/")
        assert [entry.key for entry in reading.entries] == ["worker/a", "worker/b", "worker/é"]
        assert [entry.value.decode() for entry in reading.entries] == [entry.key for entry in reading.entries]
        assert reading.revision >= last
        assert len(ledger.read("").entries) == 5
        assert ledger.read("none/").entries == ()

    def test_a_large_reading_is_whole(self, ledger: Ledger) -> None:
        values = {f"large/{index:02}": bytes([index]) * 50_000 for index in range(20)}
        for key, value in values.items():
            ledger.put(key, value)
        assert {entry.key: entry.value for entry in ledger.read("large/").entries} == values

    def test_bounds_are_kept(self, ledger: Ledger) -> None:
        ledger.put("k" * KEY_BYTES_MAX, b"v" * VALUE_BYTES_MAX)
        entry = ledger.get("k" * KEY_BYTES_MAX)
        assert entry is not None
        assert entry.value == b"v" * VALUE_BYTES_MAX
        refused: list[Callable[[], object]] = [
            lambda: ledger.put("k" * (KEY_BYTES_MAX + 1), b""),
            lambda: ledger.put("é" * (KEY_BYTES_MAX // 2 + 1), b""),
            lambda: ledger.put("", b""),
            lambda: ledger.put("\ud800", b""),
            lambda: ledger.put("a", b"v" * (VALUE_BYTES_MAX + 1)),
            lambda: ledger.compare_and_set("a", b"v" * (VALUE_BYTES_MAX + 1), expected=0),
            lambda: ledger.compare_and_set("a", b"", expected=0, while_at=("", 0)),
            lambda: ledger.compare_and_set("a", b"", expected=0, while_at=("k" * (KEY_BYTES_MAX + 1), 0)),
            lambda: ledger.compare_and_set("a", b"", expected=0, while_at=("\ud800", 0)),
            lambda: ledger.get(""),
            lambda: ledger.grant(0.0),
            lambda: ledger.grant(math.nan),
            lambda: ledger.grant(math.inf),
        ]
        for attempt in refused:
            with pytest.raises(LedgerRefused):
                attempt()
        assert ledger.get("a") is None

    # -- compare and set

    def test_compare_and_set_creates_and_follows(self, ledger: Ledger) -> None:
        first = ledger.compare_and_set("a", b"1", expected=0)
        assert first is not None
        assert ledger.compare_and_set("a", b"x", expected=0) is None
        assert ledger.compare_and_set("a", b"x", expected=first + 1) is None
        second = ledger.compare_and_set("a", b"2", expected=first)
        assert second is not None
        assert second > first
        assert ledger.compare_and_set("a", b"x", expected=first) is None
        entry = ledger.get("a")
        assert entry is not None
        assert (entry.value, entry.revision, entry.created) == (b"2", second, first)

    def test_compare_and_set_after_a_deletion_is_a_creation(self, ledger: Ledger) -> None:
        first = ledger.put("a", b"1")
        ledger.delete("a")
        assert ledger.compare_and_set("a", b"x", expected=first) is None
        assert ledger.compare_and_set("a", b"2", expected=0) is not None

    def test_compare_and_set_while_another_key_stands(self, ledger: Ledger, other: Ledger) -> None:
        view = other.put("view", b"1")
        first = ledger.compare_and_set("a", b"1", expected=0, while_at=("view", view))
        assert first is not None
        newer = other.put("view", b"2")
        for at in (("view", view), ("view", newer + 1), ("view", 0), ("nothing", newer)):
            assert ledger.compare_and_set("a", b"x", expected=first, while_at=at) is None
        assert ledger.compare_and_set("a", b"x", expected=0, while_at=("view", newer)) is None
        second = ledger.compare_and_set("a", b"2", expected=first, while_at=("view", newer))
        assert second is not None
        entry, stands = other.get("a"), other.get("view")
        assert entry is not None and stands is not None
        assert (entry.value, entry.revision, stands.revision) == (b"2", second, newer)

    def test_compare_and_set_while_another_key_is_absent(self, ledger: Ledger, other: Ledger) -> None:
        assert ledger.compare_and_set("a", b"", expected=0, while_at=("view", 0)) is not None
        view = other.put("view", b"1")
        assert ledger.compare_and_set("b", b"", expected=0, while_at=("view", 0)) is None
        other.delete("view")
        assert ledger.compare_and_set("b", b"", expected=0, while_at=("view", view)) is None
        assert ledger.compare_and_set("b", b"", expected=0, while_at=("view", 0)) is not None

    def test_compare_and_set_while_another_key_stands_under_a_lease(self, ledger: Ledger) -> None:
        lease, view = ledger.grant(60.0), ledger.put("view", b"1")
        assert ledger.compare_and_set("a", b"", expected=0, lease=lease, while_at=("view", view + 1)) is None
        assert ledger.compare_and_set("a", b"", expected=0, lease=lease, while_at=("view", view)) is not None
        ledger.revoke(lease)
        assert ledger.get("a") is None
        with pytest.raises(LeaseGone):
            ledger.compare_and_set("a", b"", expected=0, lease=lease, while_at=("view", view))

    def test_of_what_is_written_while_a_key_stands_nothing_comes_after_the_key_moved(
        self, factory: LedgerFactory
    ) -> None:
        """One moves the view on, another writes while it stands: both decide at one moment, so the order is clear."""
        with closing(factory.open()) as mover, closing(factory.open()) as writer, ThreadPoolExecutor(1) as pool:
            for round_ in range(10):
                view = mover.put("view", b"")
                moving = pool.submit(mover.compare_and_set, "view", b"newer", expected=view)
                written = writer.compare_and_set(f"w/{round_}", b"", expected=0, while_at=("view", view))
                moved = moving.result(WAIT_S)
                assert moved is not None
                assert written is None or view < written < moved

    def test_of_eight_that_race_one_wins(self, factory: LedgerFactory) -> None:
        with ExitStack() as stack:
            clients = [stack.enter_context(closing(factory.open())) for _ in range(8)]
            barrier = threading.Barrier(8)

            def race(index: int, expected: int) -> int | None:
                barrier.wait(WAIT_S)
                return clients[index].compare_and_set("view", b"%d" % index, expected=expected)

            expected = 0
            with ThreadPoolExecutor(8) as pool:
                for _ in range(5):
                    outcomes = list(pool.map(lambda index, at=expected: race(index, at), range(8)))
                    (winner,) = [index for index, outcome in enumerate(outcomes) if outcome is not None]
                    entry = clients[0].get("view")
                    assert entry is not None
                    assert (entry.value, entry.revision) == (b"%d" % winner, outcomes[winner])
                    expected = entry.revision

    # -- leases

    def test_a_lease_ends_on_time_and_its_keys_with_it(
        self, ledger: Ledger, other: Ledger, factory: LedgerFactory, ttl_s: float
    ) -> None:
        granted = time.monotonic()
        lease = ledger.grant(ttl_s)
        ledger.put("mine/a", b"", lease=lease)
        ledger.compare_and_set("mine/b", b"", expected=0, lease=lease)
        kept = ledger.put("kept", b"")
        entry = ledger.get("mine/a")
        assert entry is not None
        assert entry.lease == lease
        with closing(other.watch("", revision=kept)) as watch:
            changes = collect(watch, count(2))
        took_s = time.monotonic() - granted
        assert {(change.kind, change.key, change.value) for change in changes} == {
            ("delete", "mine/a", b""),
            ("delete", "mine/b", b""),
        }
        assert ttl_s <= took_s <= ttl_s + factory.expiry_slack_s
        assert [entry.key for entry in ledger.read("").entries] == ["kept"]
        with pytest.raises(LeaseGone):
            ledger.keep_alive(lease)
        with pytest.raises(LeaseGone):
            ledger.put("mine/a", b"", lease=lease)
        with pytest.raises(LeaseGone):
            ledger.compare_and_set("mine/a", b"", expected=0, lease=lease)
        assert ledger.get("mine/a") is None

    def test_a_lease_that_is_kept_alive_lives(self, ledger: Ledger, other: Ledger, ttl_s: float) -> None:
        lease = ledger.grant(ttl_s)
        revision = ledger.put("a", b"", lease=lease)
        with closing(other.watch("a", revision=revision)) as watch:
            until = time.monotonic() + 2.5 * ttl_s
            while time.monotonic() < until:
                assert ledger.keep_alive(lease) >= ttl_s
                assert watch.next(ttl_s / 5) == ()
        assert other.get("a") is not None

    def test_revoking_deletes_at_once(self, ledger: Ledger, other: Ledger) -> None:
        lease = ledger.grant(60.0)
        revision = ledger.put("a", b"", lease=lease)
        with closing(other.watch("a", revision=revision)) as watch:
            ledger.revoke(lease)
            (change,) = collect(watch, count(1))
        assert (change.kind, change.key) == ("delete", "a")
        assert change.revision > revision
        with pytest.raises(LeaseGone):
            ledger.keep_alive(lease)
        ledger.revoke(lease)

    def test_a_key_leaves_its_lease_when_it_is_put_without(self, ledger: Ledger) -> None:
        lease = ledger.grant(60.0)
        another = ledger.grant(60.0)
        assert lease != another
        ledger.put("a", b"", lease=lease)
        ledger.put("a", b"")
        ledger.put("b", b"", lease=lease)
        ledger.put("b", b"", lease=another)
        ledger.revoke(lease)
        assert [entry.key for entry in ledger.read("").entries] == ["a", "b"]
        ledger.revoke(another)
        assert [entry.key for entry in ledger.read("").entries] == ["a"]

    def test_a_lease_that_never_was_is_gone(self, ledger: Ledger) -> None:
        with pytest.raises(LeaseGone):
            ledger.keep_alive(123_456_789)
        with pytest.raises(LeaseGone):
            ledger.put("a", b"", lease=123_456_789)
        ledger.revoke(123_456_789)

    # -- watches

    def test_a_watch_shows_what_came_after_its_revision(self, ledger: Ledger, other: Ledger) -> None:
        start = ledger.put("w/a", b"0")
        ledger.put("w/a", b"1")
        ledger.put("elsewhere", b"")
        ledger.delete("w/a")
        with closing(other.watch("w/", revision=start)) as watch:
            assert [(c.kind, c.key, c.value) for c in collect(watch, count(2))] == [
                ("put", "w/a", b"1"),
                ("delete", "w/a", b""),
            ]
            revision = ledger.put("w/b", b"2")
            assert collect(watch, count(1)) == [Change("put", "w/b", b"2", revision)]
            assert watch.next(0.05) == ()

    def test_reading_and_then_watching_misses_nothing(self, ledger: Ledger, other: Ledger) -> None:
        ledger.put("w/a", b"0")
        reading = other.read("w/")
        revision = ledger.put("w/a", b"1")
        with closing(other.watch("w/", revision=reading.revision)) as watch:
            assert collect(watch, count(1)) == [Change("put", "w/a", b"1", revision)]

    def test_watches_see_every_change_once_and_in_order(self, factory: LedgerFactory, ledger: Ledger) -> None:
        writers, writes = 4, 30
        start = ledger.put("start", b"")

        def write(writer: int) -> list[int]:
            with closing(factory.open()) as mine:
                return [mine.put(f"w/{writer}", b"%d" % index) for index in range(writes)]

        with ExitStack() as stack:
            watches = [stack.enter_context(closing(ledger.watch("w/", revision=start))) for _ in range(3)]
            with ThreadPoolExecutor(writers + len(watches)) as pool:
                seen = [pool.submit(collect, watch, count(writers * writes)) for watch in watches]
                written = [pool.submit(write, writer) for writer in range(writers)]
                revisions = sorted(revision for future in written for revision in future.result(WAIT_S))
                for future in seen:
                    changes = future.result(WAIT_S)
                    assert [change.revision for change in changes] == revisions
                    for writer in range(writers):
                        values = [change.value for change in changes if change.key == f"w/{writer}"]
                        assert values == [b"%d" % index for index in range(writes)]

    def test_large_changes_arrive_whole(self, ledger: Ledger) -> None:
        start = ledger.put("start", b"")
        for index in range(10):
            ledger.put("large", bytes([index]) * VALUE_BYTES_MAX)
        with closing(ledger.watch("large", revision=start)) as watch:
            changes = collect(watch, count(10))
        assert [change.value for change in changes] == [bytes([i]) * VALUE_BYTES_MAX for i in range(10)]

    # -- closing

    def test_closing_a_watch_wakes_whoever_waits(self, ledger: Ledger) -> None:
        start = ledger.put("start", b"")
        watch = ledger.watch("w/", revision=start)
        assert watch.next(0.01) == ()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(watch.next, 60.0)
            watch.close()
            with pytest.raises(LedgerUnavailable):
                waiting.result(WAIT_S)
        watch.close()
        with pytest.raises(LedgerUnavailable):
            watch.next(0.0)

    def test_a_closed_ledger_says_so(self, factory: LedgerFactory) -> None:
        ledger = factory.open()
        watch = ledger.watch("w/", revision=ledger.put("a", b""))
        ledger.close()
        ledger.close()
        with pytest.raises(LedgerUnavailable):
            ledger.get("a")
        with pytest.raises(LedgerUnavailable):
            watch.next(0.0)
