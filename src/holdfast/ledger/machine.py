"""The ledger as a pure state machine: keys, revisions, leases, and the history that watches are fed from.

Deciding and changing are two steps, so that a decision can be made durable in between. A mutating operation
(`put`, `compare_and_set`, `delete`, `grant`, `revoke`, `overdue`) changes nothing: it returns the Record that would
carry it out, or None if there is nothing to do. `commit` carries a record out. A record is decided against one
state and must be committed before the next is decided.

Invariants: every change of a key has a revision of its own, one more than the last. A lease is alive until a
record ends it, however late that is: being overdue alone deletes nothing. Everything is bounded.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.core.errors import IntegrityError, LeaseGone, LedgerRefused, WatchGap
from holdfast.ledger.port import KEY_BYTES_MAX, VALUE_BYTES_MAX, Change, Entry, Reading

KEYS_MAX = 10_000
LEASES_MAX = 1_000
STORED_BYTES_MAX = 16 * 1024 * 1024  # keys and values together
HISTORY_CHANGES_MAX = 4_096
HISTORY_BYTES_MAX = 16 * 1024 * 1024
TTL_S_MIN = 0.01
TTL_S_MAX = 24 * 3600.0


@dataclass(frozen=True)
class Put:
    key: str
    value: bytes
    lease: int
    revision: int


@dataclass(frozen=True)
class Delete:
    key: str
    revision: int


@dataclass(frozen=True)
class Grant:
    lease: int
    ttl_s: float


@dataclass(frozen=True)
class LeaseEnd:
    """A lease is over and its keys, in order, are deleted with the revisions from `revision` on."""

    lease: int
    revision: int


Record = Put | Delete | Grant | LeaseEnd


@dataclass(frozen=True)
class Image:
    """The whole state but for its history and its deadlines: what a log starts from."""

    revision: int
    next_lease: int
    leases: tuple[tuple[int, float], ...]  # id, ttl_s
    entries: tuple[Entry, ...]


@dataclass
class _Lease:
    ttl_s: float
    deadline: float
    keys: set[str] = field(default_factory=set)


class LedgerMachine:
    """One run's ledger. Whoever holds it owns it: it has no locks and reads no clock."""

    def __init__(self, image: Image | None = None, *, now: float = 0.0) -> None:
        """An empty ledger, or the one of `image` with every lease renewed at `now`."""
        self._entries: dict[str, Entry] = {}
        self._leases: dict[int, _Lease] = {}
        self._stored_bytes = 0
        self._history: deque[Change] = deque()
        self._history_bytes = 0
        self._earliest = math.inf  # no lease is overdue before this; may be too early, never too late
        self.revision = image.revision if image else 0
        self._next_lease = image.next_lease if image else 1
        self._floor = self.revision  # the history holds every change after this revision
        for lease, ttl_s in image.leases if image else ():
            self._add_lease(lease, ttl_s, now)
        for entry in image.entries if image else ():
            self._check_image_entry(entry)
            self._store(entry)

    # -- reading

    def get(self, key: str) -> Entry | None:
        check_key(key)
        return self._entries.get(key)

    def read(self, prefix: str) -> Reading:
        check_prefix(prefix)
        keys = sorted(key for key in self._entries if key.startswith(prefix))
        return Reading(tuple(self._entries[key] for key in keys), self.revision)

    def changes_after(self, revision: int, prefix: str) -> tuple[Change, ...]:
        """Every change under `prefix` after `revision`, oldest first. Raises WatchGap if some are forgotten."""
        check_prefix(prefix)
        if revision < self._floor:
            raise WatchGap(f"changes after revision {revision} are asked for, those after {self._floor} are kept")
        if revision > self.revision:
            raise WatchGap(f"revision {revision} is asked for, this ledger has only reached {self.revision}")
        found: list[Change] = []
        for change in reversed(self._history):  # from the end: a watch is nearly always close to it
            if change.revision <= revision:
                break
            if change.key.startswith(prefix):
                found.append(change)
        found.reverse()
        return tuple(found)

    @property
    def next_deadline(self) -> float:
        """No lease is overdue before this."""
        return self._earliest

    # -- deciding

    def put(self, key: str, value: bytes, *, lease: int = 0) -> Put:
        check_key(key)
        check_value(value)
        self._check_lease(lease)
        old = self._entries.get(key)
        if old is None and len(self._entries) >= KEYS_MAX:
            raise LedgerRefused(f"the ledger holds {KEYS_MAX} keys already, which is its limit")
        growth = _weight(key, value) - (_weight(key, old.value) if old else 0)
        if growth > 0 and self._stored_bytes + growth > STORED_BYTES_MAX:
            raise LedgerRefused(f"the ledger would hold more than {STORED_BYTES_MAX} bytes, which is its limit")
        return Put(key, value, lease, self.revision + 1)

    def compare_and_set(
        self, key: str, value: bytes, *, expected: int, lease: int = 0, while_at: tuple[str, int] | None = None
    ) -> Put | None:
        check_key(key)
        check_value(value)
        if while_at is not None:
            check_key(while_at[0])
            if self._revision_of(while_at[0]) != while_at[1]:
                return None
        if self._revision_of(key) != expected:
            return None
        return self.put(key, value, lease=lease)

    def delete(self, key: str) -> Delete | None:
        check_key(key)
        return Delete(key, self.revision + 1) if key in self._entries else None

    def grant(self, ttl_s: float) -> Grant:
        check_ttl(ttl_s)
        if len(self._leases) >= LEASES_MAX:
            raise LedgerRefused(f"the ledger holds {LEASES_MAX} leases already, which is its limit")
        return Grant(self._next_lease, ttl_s)

    def revoke(self, lease: int) -> LeaseEnd | None:
        return LeaseEnd(lease, self.revision + 1) if lease in self._leases else None

    def overdue(self, now: float) -> LeaseEnd | None:
        """The end of the lease that has been overdue for longest, if any is. Ask again until it is None."""
        if now < self._earliest:
            return None
        self._earliest = min((held.deadline for held in self._leases.values()), default=math.inf)
        if now < self._earliest:
            return None
        lease = min(self._leases, key=lambda one: (self._leases[one].deadline, one))
        return LeaseEnd(lease, self.revision + 1)

    # -- changing

    def commit(self, record: Record, now: float) -> tuple[Change, ...]:
        """Carry out a record. Raises IntegrityError if it does not follow from this state (a log that lies)."""
        if isinstance(record, Grant):
            if record.lease != self._next_lease:
                raise IntegrityError(f"lease {record.lease} granted where {self._next_lease} was due")
            self._add_lease(record.lease, record.ttl_s, now)
            self._next_lease += 1
            return ()
        if record.revision != self.revision + 1:
            raise IntegrityError(f"revision {record.revision} follows {self.revision}")
        if isinstance(record, Put):
            if record.lease and record.lease not in self._leases:
                raise IntegrityError(f"{record.key!r} is put under lease {record.lease}, which is not alive")
            old = self._entries.get(record.key)
            created = old.created if old else record.revision
            self._store(Entry(record.key, record.value, record.revision, created, record.lease))
            return (self._remember(Change("put", record.key, record.value, record.revision)),)
        if isinstance(record, Delete):
            if record.key not in self._entries:
                raise IntegrityError(f"{record.key!r} is deleted and was not there")
            return (self._remove(record.key),)
        if record.lease not in self._leases:
            raise IntegrityError(f"lease {record.lease} ends and was not alive")
        changes = tuple(self._remove(key) for key in sorted(self._leases[record.lease].keys))
        del self._leases[record.lease]
        return changes

    def keep_alive(self, lease: int, now: float) -> float:
        held = self._leases.get(lease)
        if held is None:
            raise LeaseGone(f"lease {lease} ran out or was revoked")
        held.deadline = now + held.ttl_s
        return held.ttl_s

    def extend(self, by_s: float) -> None:
        """Put off every deadline: nobody could renew during the last `by_s` seconds."""
        self._move_deadlines(lambda held: held.deadline + by_s)

    def renew_all(self, now: float) -> None:
        """Give every lease its full time again."""
        self._move_deadlines(lambda held: now + held.ttl_s)

    def export(self) -> Image:
        return Image(
            self.revision,
            self._next_lease,
            tuple((lease, held.ttl_s) for lease, held in sorted(self._leases.items())),
            self.read("").entries,
        )

    # -- inside

    def _revision_of(self, key: str) -> int:
        entry = self._entries.get(key)
        return entry.revision if entry else 0

    def _check_lease(self, lease: int) -> None:
        if lease and lease not in self._leases:
            raise LeaseGone(f"lease {lease} ran out or was revoked")

    def _check_image_entry(self, entry: Entry) -> None:
        if entry.lease and entry.lease not in self._leases:
            raise IntegrityError(f"{entry.key!r} is under lease {entry.lease}, which is not alive")
        if not 0 < entry.created <= entry.revision <= self.revision:
            raise IntegrityError(f"{entry.key!r} has revision {entry.revision}, the ledger {self.revision}")

    def _move_deadlines(self, move: Callable[[_Lease], float]) -> None:
        for held in self._leases.values():
            held.deadline = move(held)
        self._earliest = min((held.deadline for held in self._leases.values()), default=math.inf)

    def _add_lease(self, lease: int, ttl_s: float, now: float) -> None:
        self._leases[lease] = _Lease(ttl_s, now + ttl_s)
        self._earliest = min(self._earliest, now + ttl_s)

    def _store(self, entry: Entry) -> None:
        """Put an entry in the place of the one before it, and under its lease alone."""
        self._take_out(entry.key)
        self._entries[entry.key] = entry
        self._stored_bytes += _weight(entry.key, entry.value)
        if entry.lease:
            self._leases[entry.lease].keys.add(entry.key)

    def _take_out(self, key: str) -> None:
        old = self._entries.pop(key, None)
        if old is not None:
            self._stored_bytes -= _weight(key, old.value)
            if old.lease:
                self._leases[old.lease].keys.discard(key)

    def _remove(self, key: str) -> Change:
        self._take_out(key)
        return self._remember(Change("delete", key, b"", self.revision + 1))

    def _remember(self, change: Change) -> Change:
        self.revision = change.revision
        self._history.append(change)
        self._history_bytes += _weight(change.key, change.value)
        while len(self._history) > HISTORY_CHANGES_MAX or self._history_bytes > HISTORY_BYTES_MAX:
            oldest = self._history.popleft()
            self._history_bytes -= _weight(oldest.key, oldest.value)
            self._floor = oldest.revision
        return change


def check_key(key: str) -> None:
    if not 0 < _encoded_bytes(key, "key") <= KEY_BYTES_MAX:
        raise LedgerRefused(f"a key has 1 to {KEY_BYTES_MAX} bytes, not {len(key.encode())}: {key[:80]!r}")


def check_prefix(prefix: str) -> None:
    if _encoded_bytes(prefix, "prefix") > KEY_BYTES_MAX:
        raise LedgerRefused(f"a prefix has at most {KEY_BYTES_MAX} bytes, not {len(prefix.encode())}")


def check_value(value: bytes) -> None:
    if len(value) > VALUE_BYTES_MAX:
        raise LedgerRefused(
            f"a value has at most {VALUE_BYTES_MAX} bytes, not {len(value)}",
            hint="the ledger is for small facts; put large data in storage and its name here",
        )


def check_ttl(ttl_s: float) -> None:
    if not TTL_S_MIN <= ttl_s <= TTL_S_MAX:  # also catches NaN
        raise LedgerRefused(f"a lease lives {TTL_S_MIN} to {TTL_S_MAX:.0f} seconds, not {ttl_s}")


def _encoded_bytes(text: str, what: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise LedgerRefused(f"a {what} is text that UTF-8 can write, not {text[:80]!r}") from error


def _weight(key: str, value: bytes) -> int:
    return len(key) + len(value)
