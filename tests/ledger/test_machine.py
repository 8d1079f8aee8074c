"""The pure machine against a model that is as simple as can be, and its bounds."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from holdfast.core.errors import IntegrityError, LeaseGone, LedgerRefused, WatchGap
from holdfast.ledger import machine as limits
from holdfast.ledger.machine import Delete, Grant, LeaseEnd, LedgerMachine, Put, Record
from holdfast.ledger.port import Change, Entry

keys = st.sampled_from(["a", "b", "w/a", "w/b", "w/é"])
values = st.binary(max_size=3)
leases = st.integers(0, 6)


class AgainstTheModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 100.0
        self.machine = LedgerMachine()
        self.forgotten = 0  # a restored machine has no history up to here
        self.entries: dict[str, Entry] = {}
        self.leases: dict[int, tuple[float, float]] = {}  # id -> ttl, deadline
        self.granted = 0
        self.changes: list[Change] = []

    def commit(self, record: Record) -> None:
        before = len(self.changes)
        found = self.machine.commit(record, self.now)
        if isinstance(record, Put):
            self.model_put(record)
        elif isinstance(record, Delete):
            self.model_delete(record.key)
        elif isinstance(record, LeaseEnd):
            del self.leases[record.lease]
            for key in sorted(key for key, entry in self.entries.items() if entry.lease == record.lease):
                self.model_delete(key)
        assert list(found) == self.changes[before:]

    def model_put(self, record: Put) -> None:
        revision = len(self.changes) + 1
        assert record.revision == revision
        created = self.entries[record.key].created if record.key in self.entries else revision
        self.entries[record.key] = Entry(record.key, record.value, revision, created, record.lease)
        self.changes.append(Change("put", record.key, record.value, revision))

    def model_delete(self, key: str) -> None:
        del self.entries[key]
        self.changes.append(Change("delete", key, b"", len(self.changes) + 1))

    @rule(key=keys, value=values, lease=leases)
    def put(self, key: str, value: bytes, lease: int) -> None:
        if lease and lease not in self.leases:
            with pytest.raises(LeaseGone):
                self.machine.put(key, value, lease=lease)
        else:
            self.commit(self.machine.put(key, value, lease=lease))

    @rule(key=keys, value=values, right=st.booleans(), guess=st.integers(0, 5), other=st.none() | keys)
    def compare_and_set(self, key: str, value: bytes, right: bool, guess: int, other: str | None) -> None:
        revision = self.entries[key].revision if key in self.entries else 0
        expected = revision if right else guess
        stands = self.entries[other].revision if other in self.entries else 0
        while_at = None if other is None else (other, guess)
        record = self.machine.compare_and_set(key, value, expected=expected, while_at=while_at)
        assert (record is not None) == (expected == revision and (other is None or guess == stands))
        if record is not None:
            self.commit(record)

    @rule(key=keys)
    def delete(self, key: str) -> None:
        record = self.machine.delete(key)
        assert (record is not None) == (key in self.entries)
        if record is not None:
            self.commit(record)

    @rule(ttl_s=st.integers(1, 10))
    def grant(self, ttl_s: int) -> None:
        record = self.machine.grant(float(ttl_s))
        self.granted += 1
        assert record == Grant(self.granted, ttl_s)
        self.leases[self.granted] = (ttl_s, self.now + ttl_s)
        self.commit(record)

    @rule(lease=leases)
    def revoke(self, lease: int) -> None:
        record = self.machine.revoke(lease)
        assert (record is not None) == (lease in self.leases)
        if record is not None:
            self.commit(record)

    @rule(lease=leases)
    def keep_alive(self, lease: int) -> None:
        if lease in self.leases:
            ttl_s, _ = self.leases[lease]
            assert self.machine.keep_alive(lease, self.now) == ttl_s
            self.leases[lease] = (ttl_s, self.now + ttl_s)
        else:
            with pytest.raises(LeaseGone):
                self.machine.keep_alive(lease, self.now)

    @rule(by_s=st.integers(0, 6))
    def time_passes(self, by_s: int) -> None:
        self.now += by_s
        overdue = {lease for lease, (_, deadline) in self.leases.items() if deadline <= self.now}
        while (record := self.machine.overdue(self.now)) is not None:
            overdue.remove(record.lease)
            self.commit(record)
        assert not overdue

    @rule(by_s=st.integers(0, 6))
    def stall(self, by_s: int) -> None:
        self.now += by_s
        self.machine.extend(by_s)
        self.leases = {lease: (ttl, deadline + by_s) for lease, (ttl, deadline) in self.leases.items()}

    @rule()
    def restart(self) -> None:
        self.machine = LedgerMachine(self.machine.export(), now=self.now)
        self.forgotten = len(self.changes)
        self.leases = {lease: (ttl, self.now + ttl) for lease, (ttl, _) in self.leases.items()}

    @rule(revision=st.integers(0, 30), prefix=st.sampled_from(["", "w/", "a", "zzz"]))
    def watch(self, revision: int, prefix: str) -> None:
        if not self.forgotten <= revision <= len(self.changes):
            with pytest.raises(WatchGap):
                self.machine.changes_after(revision, prefix)
        else:
            expected = [c for c in self.changes if c.revision > revision and c.key.startswith(prefix)]
            assert list(self.machine.changes_after(revision, prefix)) == expected

    @invariant()
    def same_state(self) -> None:
        reading = self.machine.read("")
        assert reading.revision == len(self.changes)
        assert list(reading.entries) == [self.entries[key] for key in sorted(self.entries)]
        assert all(self.machine.get(key) == entry for key, entry in self.entries.items())
        assert self.machine.next_deadline <= min((d for _, d in self.leases.values()), default=math.inf)


TestAgainstTheModel = AgainstTheModel.TestCase
TestAgainstTheModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def put(machine: LedgerMachine, key: str, value: bytes = b"") -> None:
    machine.commit(machine.put(key, value), 0.0)


def test_deciding_changes_nothing() -> None:
    machine = LedgerMachine()
    machine.commit(machine.grant(1.0), 0.0)
    put(machine, "a")
    before = machine.export()
    machine.put("b", b"")
    machine.compare_and_set("a", b"x", expected=1)
    machine.delete("a")
    machine.grant(1.0)
    machine.revoke(1)
    assert machine.overdue(10.0) == LeaseEnd(1, 2)
    assert machine.export() == before


def test_a_record_that_does_not_follow_is_not_committed() -> None:
    machine = LedgerMachine()
    wrong: list[Record] = [Put("a", b"", 0, 2), Put("a", b"", 7, 1), Delete("a", 1), Grant(2, 1.0), LeaseEnd(1, 1)]
    for record in wrong:
        with pytest.raises(IntegrityError):
            machine.commit(record, 0.0)
    assert machine.export() == LedgerMachine().export()


def test_the_number_of_keys_is_bounded() -> None:
    machine = LedgerMachine()
    for index in range(limits.KEYS_MAX):
        put(machine, f"{index}")
    with pytest.raises(LedgerRefused, match="10000 keys"):
        machine.put("one more", b"")
    put(machine, "0", b"but those that are there can change")
    machine.commit(machine.delete("1") or pytest.fail("it was there"), 0.0)
    put(machine, "one more")


def test_the_number_of_leases_is_bounded() -> None:
    machine = LedgerMachine()
    for _ in range(limits.LEASES_MAX):
        machine.commit(machine.grant(1.0), 0.0)
    with pytest.raises(LedgerRefused, match="1000 leases"):
        machine.grant(1.0)


def test_the_bytes_are_bounded() -> None:
    machine = LedgerMachine()
    value = bytes(limits.VALUE_BYTES_MAX)
    for index in range(limits.STORED_BYTES_MAX // (len(value) + 3)):
        put(machine, f"{index:03}", value)
    with pytest.raises(LedgerRefused, match="more than"):
        machine.put("more", value)
    put(machine, "000", b"smaller is always possible")
    put(machine, "more", bytes(1000))


def test_history_is_bounded_and_says_what_it_forgot() -> None:
    machine = LedgerMachine()
    for _ in range(limits.HISTORY_CHANGES_MAX + 10):
        put(machine, "a")
    assert len(machine.changes_after(10, "")) == limits.HISTORY_CHANGES_MAX
    with pytest.raises(WatchGap):
        machine.changes_after(9, "")


def test_history_is_bounded_in_bytes() -> None:
    machine = LedgerMachine()
    value = bytes(limits.VALUE_BYTES_MAX)
    for _ in range(300):
        put(machine, "a", value)
    assert len(machine.changes_after(machine.revision - 250, "")) == 250
    with pytest.raises(WatchGap):
        machine.changes_after(0, "")
