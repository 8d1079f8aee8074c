"""The ledger's port: what every implementation offers and what its callers may rely on.

A ledger is a small, strongly consistent map from keys to bytes with one growing revision. Writes are rare and
tiny; nothing on the path of a training step touches it. The contract suite in tests/ledger runs against every
implementation and says more precisely than this page what is meant.

Bounds are part of the contract: a key has at most KEY_BYTES_MAX bytes, a value VALUE_BYTES_MAX, and every call
returns or raises a LedgerError within its client's deadline.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

KEY_BYTES_MAX = 512
VALUE_BYTES_MAX = 64 * 1024


@dataclass(frozen=True)
class Entry:
    """A key as it stands. `revision` is that of its last change, `created` that of its creation."""

    key: str
    value: bytes
    revision: int
    created: int
    lease: int = 0


@dataclass(frozen=True)
class Reading:
    """All entries under a prefix, sorted by key, as of `revision`. Watch from there to miss nothing."""

    entries: tuple[Entry, ...]
    revision: int


@dataclass(frozen=True)
class Change:
    """One change of one key. A deletion (also by a lease that ran out) has an empty value."""

    kind: Literal["put", "delete"]
    key: str
    value: bytes
    revision: int


class Watch(Protocol):
    """Changes under a prefix, in order, none missing and none twice."""

    def next(self, timeout_s: float) -> tuple[Change, ...]:
        """The next changes; empty if there were none in time.

        Raises WatchGap when changes were missed for good, LedgerUnavailable when the ledger cannot be reached
        (calling again resumes where it left off).
        """

    def close(self) -> None: ...


class Ledger(Protocol):
    """One run's view of the ledger."""

    def get(self, key: str) -> Entry | None: ...

    def read(self, prefix: str) -> Reading: ...

    def put(self, key: str, value: bytes, *, lease: int = 0) -> int:
        """Write, whatever stood there. Returns the new revision. Raises LeaseGone if the lease is not alive."""

    def compare_and_set(
        self, key: str, value: bytes, *, expected: int, lease: int = 0, while_at: tuple[str, int] | None = None
    ) -> int | None:
        """Write if the key's revision is `expected` (0: the key is absent). The new revision, or None if not.

        `while_at` is another key and the revision that it must have too, at the same moment.
        After LedgerUnavailable the outcome is unknown: read the key to learn it.
        """

    def delete(self, key: str) -> bool:
        """Delete; False if there was nothing."""

    def grant(self, ttl_s: float) -> int:
        """A new lease. Keys put with it are deleted when it is not kept alive for `ttl_s`.

        The ledger may round `ttl_s` up to what it supports.
        """

    def keep_alive(self, lease: int) -> float:
        """Renew for another time to live, which is returned. Raises LeaseGone."""

    def revoke(self, lease: int) -> None:
        """End a lease now and delete its keys. A lease that is not there is no error."""

    def watch(self, prefix: str, *, revision: int) -> Watch:
        """Changes after `revision` under `prefix`."""

    def close(self) -> None: ...
