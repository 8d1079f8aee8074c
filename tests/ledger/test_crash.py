"""A real server process that is killed, stopped and starved of disk, under real clients."""

from __future__ import annotations

import resource
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from holdfast.core.errors import LeaseGone, LedgerRefused, LedgerUnavailable, WatchGap
from holdfast.ledger.embedded import EmbeddedLedger, EmbeddedServer, ServerLimits
from holdfast.ledger.journal import LOG_NAME
from holdfast.ledger.port import Change

from .contract import WAIT_S, collect, count
from .serving import SECRET, ServerProcess

pytestmark = pytest.mark.processes


@dataclass
class Writer:
    """Counts up in a key by compare-and-set and checks after each failure that nothing acknowledged is lost."""

    ledger: EmbeddedLedger
    key: str
    acknowledged: dict[int, bytes] = field(default_factory=dict)  # revision -> value
    unknown: int = 0

    def run(self, stop: threading.Event) -> None:
        number = revision = 0
        while not stop.is_set():
            value = b"%d" % (number + 1)
            try:
                written = self.ledger.compare_and_set(self.key, value, expected=revision)
                assert written is not None, "nobody else writes this key"
                assert written > revision
                self.acknowledged[written] = value
            except LedgerUnavailable:
                self.unknown += 1
                entry = self.ledger.get(self.key)
                found = (b"0", 0) if entry is None else (entry.value, entry.revision)
                if found == (b"%d" % number, revision):
                    continue
                assert found[0] == value, (self.key, found, number, revision)
                written = found[1]
            number, revision = number + 1, written


def test_killed_under_writes_it_loses_nothing_that_it_acknowledged(process: ServerProcess) -> None:
    stack = ExitStack()
    clients = [stack.enter_context(closing(process.client())) for _ in range(3)]
    writers = [Writer(client, f"w/{index}") for index, client in enumerate(clients[1:])]
    stop, seen = threading.Event(), list[Change]()

    def follow() -> None:
        with closing(clients[0].watch("w/", revision=0)) as watch:
            last = 0
            while not stop.is_set() or last < clients[0].read("w/").revision:
                try:
                    changes = watch.next(0.2)
                except LedgerUnavailable:
                    continue  # it resumes where it left off
                seen.extend(changes)
                last = changes[-1].revision if changes else last

    with stack, ThreadPoolExecutor(3) as pool:
        running = [pool.submit(writer.run, stop) for writer in writers] + [pool.submit(follow)]
        try:
            for round_number in range(1, 6):
                deadline = time.monotonic() + WAIT_S
                while min(len(writer.acknowledged) for writer in writers) < 20 * round_number:
                    assert time.monotonic() < deadline, "the writers are stuck"
                    for future in running:
                        if future.done():
                            future.result()
                    time.sleep(0.001)
                process.kill()
                process.start()
        finally:
            stop.set()
        for future in running:
            future.result(2 * WAIT_S)
    revisions = [change.revision for change in seen]
    assert revisions == sorted(set(revisions)), "in order and none twice"
    watched = {change.revision: change.value for change in seen}
    for writer in writers:
        assert writer.acknowledged.items() <= watched.items()


def test_a_watch_and_a_lease_go_on_after_a_restart(process: ServerProcess) -> None:
    with closing(process.client()) as ledger:
        mine, lost = ledger.grant(1.0), ledger.grant(1.0)
        ledger.put("w/mine", b"", lease=mine)
        start = ledger.put("w/lost", b"", lease=lost)
        with closing(ledger.watch("w/", revision=start)) as watch:
            first = ledger.put("w/a", b"1")
            assert collect(watch, count(1)) == [Change("put", "w/a", b"1", first)]
            unseen = ledger.put("w/a", b"2")
            process.kill()
            changes: list[Change] = []
            with pytest.raises(LedgerUnavailable):
                while True:
                    changes += watch.next(0.05)
            process.start()
            assert ledger.keep_alive(mine) == 1.0
            restarted = time.monotonic()
            after = ledger.put("w/a", b"3")
            assert after == unseen + 1
            changes += collect(watch, lambda got: bool(got) and got[-1].revision >= after)
            assert [change.revision for change in changes] == [unseen, after]
            while not any(change.key == "w/lost" for change in changes):
                assert time.monotonic() < restarted + WAIT_S
                ledger.keep_alive(mine)
                changes += watch.next(0.2)
            assert time.monotonic() - restarted < 2.0
            assert ledger.get("w/mine") is not None
            with pytest.raises(LeaseGone):
                ledger.keep_alive(lost)


def test_a_watch_whose_changes_were_compacted_away_is_told(tmp_path: Path, socket_path: Path) -> None:
    limits = ServerLimits(garbage_bytes_max=200)
    server = EmbeddedServer(tmp_path, socket_path, SECRET, limits=limits)
    server.start()
    ledger = EmbeddedLedger(socket_path, SECRET)
    start = ledger.put("a", b"0")
    watch = ledger.watch("a", revision=start)
    for index in range(50):
        last = ledger.put("a", b"%d" % index)
    server.stop()
    server.start()
    with pytest.raises(WatchGap):
        watch.next(WAIT_S)
    with closing(ledger.watch("a", revision=ledger.read("a").revision)) as again:
        assert ledger.put("a", b"after") == last + 1
        assert [change.value for change in collect(again, count(1))] == [b"after"]
    ledger.close()
    server.stop()


def test_while_it_is_down_calls_end_in_time_and_afterwards_work(process: ServerProcess) -> None:
    with closing(process.client()) as patient, closing(process.client(timeout_s=0.5)) as hasty:
        revision = patient.put("a", b"1")
        assert hasty.get("a") is not None
        process.kill()
        began = time.monotonic()
        for attempt in (lambda: hasty.get("a"), lambda: hasty.put("a", b"2"), lambda: hasty.grant(1.0)):
            with pytest.raises(LedgerUnavailable):
                attempt()
        assert time.monotonic() - began < 3.0
        process.start()
        assert patient.compare_and_set("a", b"2", expected=revision) == revision + 1
        assert hasty.get("a") is not None


def test_a_frozen_server_answers_nobody_and_ends_no_lease(process: ServerProcess) -> None:
    with closing(process.client()) as ledger, closing(process.client(timeout_s=0.5)) as hasty:
        lease = ledger.grant(1.0)
        assert hasty.get("a") is None
        start = ledger.put("a", b"", lease=lease)
        with closing(ledger.watch("a", revision=start)) as watch:
            assert watch.next(0.01) == ()
            process.freeze()
            with pytest.raises(LedgerUnavailable, match="may or may not"):
                hasty.put("b", b"")
            with pytest.raises(LedgerUnavailable):
                hasty.get("a")
            assert watch.next(1.2) == ()  # longer than the lease
            process.thaw()
            assert watch.next(0.4) == (), "nobody could renew while it was frozen"
            assert hasty.put("c", b"") > start, "the late answer to `b` is not taken for this one"
            assert ledger.keep_alive(lease) == 1.0
            changes = collect(watch, count(1))
            assert [(change.kind, change.key) for change in changes] == [("delete", "a")]


def test_a_full_disk_refuses_writes_and_nothing_else(process: ServerProcess) -> None:
    with closing(process.client()) as ledger:
        lease, lost = ledger.grant(30.0), ledger.grant(0.2)
        ledger.put("b", b"", lease=lost)
        revision = ledger.put("a", b"1", lease=lease)
        size = (process.directory / LOG_NAME).stat().st_size
        # Room for a few bytes more: the next record is cut in the middle.
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size + 10, resource.RLIM_INFINITY))
        for attempt in (
            lambda: ledger.put("a", b"2"),
            lambda: ledger.compare_and_set("a", b"2", expected=revision),
            lambda: ledger.delete("a"),
            lambda: ledger.grant(1.0),
            lambda: ledger.revoke(lease),
        ):
            with pytest.raises(LedgerRefused, match="disk is full") as refusal:
                attempt()
            assert refusal.value.hint
        with closing(ledger.watch("b", revision=revision)) as watch:
            assert watch.next(0.5) == (), "an end that cannot be recorded has not happened"
            reading = ledger.read("")
            assert [(entry.key, entry.value) for entry in reading.entries] == [("a", b"1"), ("b", b"")]
            assert reading.revision == revision
            assert ledger.keep_alive(lease) == 30.0
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
            assert [(change.kind, change.key) for change in collect(watch, count(1))] == [("delete", "b")]
        last = ledger.compare_and_set("a", b"2", expected=revision)
        assert last == revision + 2
        process.kill()
        process.start()
        entry = ledger.get("a")
        assert entry is not None
        assert (entry.value, entry.revision) == (b"2", last)
