"""The port of storage: what every implementation offers, and what its callers may rely on.

A storage is one directory (or prefix) somewhere. Names are relative to it, parts joined by `/`:
`checkpoint-000000000120/manifest.json`. A name is there with all its bytes, or it is not there: no reader ever sees
half of a write, and what a call has returned from survives a power cut. Listing shows every write that has returned.

Every call returns or raises a StorageError in bounded time: StorageUnavailable where trying again may help (no
answer, overloaded, full), StorageRefused where somebody must act (credentials, no such bucket, read-only), NotStored
where the name is not there. Callers retry; an implementation tries again only within a call, for seconds.
Safe to use from several threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Stored:
    name: str
    size: int  # in bytes


class Storage(Protocol):
    uri: str  # as the user wrote it, without secrets
    writers: int  # how many writes at a time are worth it
    block_bytes: int  # how much is worth a read of its own, where a file is read and used a piece at a time

    def write(self, name: str, data: memoryview) -> None:
        """Make `name` hold these bytes, whatever it held. Whole and durable when this returns; else as before.

        `data` is contiguous bytes. Where its address is a multiple of 4096, a disk may be written directly.
        """

    def create(self, name: str, data: bytes) -> bool:
        """The same for few bytes, if nothing has that name. False: something has. Of several at once, one wins.

        After StorageUnavailable the outcome is unknown: read the name to learn it.
        """

    def read(self, name: str, bytes_max: int) -> bytes:
        """All of it; IntegrityError if it is longer than `bytes_max`."""

    def read_into(self, name: str, memory: memoryview, offset: int = 0) -> None:
        """Fill `memory` with the bytes from `offset` on; IntegrityError if there are fewer."""

    def list(self, prefix: str = "") -> list[Stored]:
        """Everything whose name starts with `prefix`, sorted by name. Nothing at all is no error."""

    def delete(self, name: str) -> None:
        """Nothing under that name is no error."""

    def close(self) -> None: ...
