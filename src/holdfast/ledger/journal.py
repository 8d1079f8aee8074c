"""The embedded ledger's log on disk: what makes an acknowledged write survive the death of the agent or the host.

`ledger.log` is an image (the whole state at some revision), then every record committed since. Each is a frame
(log/frames.py) around a line of JSON. A record is on disk before anyone hears of it. When the records outweigh the
image, a new log is written under another name, synced and renamed over the old one.

Reading it back: a record torn at the very end was never acknowledged and is cut off. Anything else that is wrong is
damage, raises IntegrityError and is left as it is for a person to look at.

A Journal belongs to one thread. Between processes a lock on the directory keeps a second server out.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from holdfast.core.errors import ConfigError, IntegrityError, LedgerRefused, ProtocolError, StorageError
from holdfast.ledger.machine import Delete, Grant, Image, LeaseEnd, LedgerMachine, Put, Record
from holdfast.ledger.port import Entry
from holdfast.ledger.wire import (
    decode_bytes,
    decode_entry,
    decode_integer,
    decode_seconds,
    decode_text,
    encode_bytes,
    encode_entry,
)
from holdfast.log import frames
from holdfast.log.files import is_full, lock_directory, sync_directory, write_all
from holdfast.log.frames import SECTOR_BYTES

__all__ = ["LOG_NAME", "NEW_LOG_NAME", "SECTOR_BYTES", "Journal"]

LOG_NAME = "ledger.log"
NEW_LOG_NAME = "ledger.log.new"
LOCK_NAME = "lock"
FORMAT = 1
GARBAGE_BYTES_MAX = 1024 * 1024
RECORD_BYTES_MAX = 256 * 1024

_WRITE_BYTES = 1024 * 1024


class Journal:
    """The open log. `open` gives it together with the machine that it describes."""

    def __init__(self, directory: Path, lock: int, garbage_bytes_max: int) -> None:
        self._directory = directory
        self._path = directory / LOG_NAME
        self._lock = lock
        self._garbage_bytes_max = garbage_bytes_max
        self._file = -1
        self._size = 0  # up to here the log is whole and on disk
        self._compact_at = 0
        self._suspect = ""  # why the end of the file cannot be trusted, until it is written anew

    @classmethod
    def open(
        cls, directory: Path, *, now: float, garbage_bytes_max: int = GARBAGE_BYTES_MAX
    ) -> tuple[Journal, LedgerMachine]:
        """Create or read back the log in `directory`. Every lease gets its full time from `now`."""
        try:
            directory.mkdir(parents=True, exist_ok=True)
            journal = cls(directory, _lock(directory), garbage_bytes_max)
        except OSError as error:
            raise StorageError(f"cannot open the ledger in {directory}: {error}") from error
        try:
            (directory / NEW_LOG_NAME).unlink(missing_ok=True)  # left behind by a death in the middle of `compact`
            if not journal._path.exists():
                machine = LedgerMachine()
                journal._rewrite(machine)
            else:
                machine = journal._read_back(now)
        except OSError as error:
            journal.close()
            raise StorageError(f"cannot read or write {journal._path}: {error}") from error
        except BaseException:
            journal.close()
            raise
        return journal, machine

    def append(self, record: Record, machine: LedgerMachine) -> None:
        """Put a record on disk. After LedgerRefused the log is as it was. `machine` has not committed it yet."""
        try:
            if self._suspect:
                self._rewrite(machine)
            data = _encode(_record_fields(record), self._size)
            self._write_all(data)
        except OSError as error:
            raise _refusal(error, self._path) from error
        self._size += len(data)

    def compact_if_due(self, machine: LedgerMachine) -> None:
        """Write the log anew if most of it is garbage. A failure is no harm: the old log stays."""
        if self._size < self._compact_at:
            return
        try:
            self._rewrite(machine)
        except OSError:
            self._compact_at = self._size + self._garbage_bytes_max

    def close(self) -> None:
        for descriptor in (self._file, self._lock):
            if descriptor >= 0:
                os.close(descriptor)
        self._file = self._lock = -1

    # -- writing

    def _write_all(self, data: bytes) -> None:
        """Append and sync, or leave the log as it was."""
        try:
            write_all(self._file, data)
        except OSError as error:
            self._cut(str(error))
            raise
        try:
            os.fdatasync(self._file)
        except OSError as error:
            # After a failed sync the kernel may call the lost pages clean: only a new file can be trusted.
            self._cut(str(error))
            self._suspect = str(error)
            raise

    def _cut(self, why: str) -> None:
        """Take back a record that is only partly there, so that a restart does not find it."""
        try:
            os.ftruncate(self._file, self._size)
            os.fdatasync(self._file)
        except OSError:
            self._suspect = why

    def _rewrite(self, machine: LedgerMachine) -> None:
        """A new log that starts from the machine as it is, in the place of the old one."""
        new = self._directory / NEW_LOG_NAME
        file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            size = 0
            chunk = bytearray()
            for fields in _image_fields(machine.export()):
                chunk += _encode(fields, size + len(chunk))
                if len(chunk) >= _WRITE_BYTES:
                    write_all(file, chunk)
                    size += len(chunk)
                    chunk.clear()
            write_all(file, chunk)
            size += len(chunk)
            os.fsync(file)
            new.rename(self._path)
        except OSError:
            os.close(file)
            new.unlink(missing_ok=True)
            raise
        if self._file >= 0:
            os.close(self._file)
        self._file, self._size, self._suspect = file, size, ""
        self._compact_after(size)
        try:
            sync_directory(self._directory)
        except OSError as error:
            # The name may still mean the old log after a power cut: trust nothing until a rewrite goes through.
            self._suspect = str(error)
            raise

    def _compact_after(self, size: int) -> None:
        self._compact_at = size + max(self._garbage_bytes_max, size)

    # -- reading back

    def _read_back(self, now: float) -> LedgerMachine:
        data = self._path.read_bytes()
        lines = _lines(data)
        try:
            image, image_end = _read_image(lines)
            machine = LedgerMachine(image, now=now)
            end = image_end
            for fields, line_end in lines:
                machine.commit(_decode_record(fields), now)
                end = line_end
        except (IntegrityError, ProtocolError) as error:
            raise _damage(self._path, error.message) from error
        machine.renew_all(now)
        self._file = os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        if end < len(data):
            os.ftruncate(self._file, end)
        # What was read may be only in memory yet, if the server died between writing and syncing.
        os.fsync(self._file)
        self._size = end
        self._compact_after(image_end)
        return machine


def _lock(directory: Path) -> int:
    try:
        return lock_directory(directory, LOCK_NAME)
    except BlockingIOError as error:
        raise ConfigError(
            f"another ledger server has {directory} open",
            hint="one agent at a time serves a run; stop the other one first",
        ) from error


def _refusal(error: OSError, path: Path) -> LedgerRefused:
    if is_full(error):
        return LedgerRefused(
            f"the ledger's disk is full: {path}: {error.strerror}",
            hint="free some space there; writes are accepted again as soon as there is room",
        )
    return LedgerRefused(
        f"the ledger's disk failed: {path}: {error.strerror}", hint="look at the disk; reads still work"
    )


def _damage(path: Path, what: str) -> IntegrityError:
    return IntegrityError(
        f"{path} is damaged: {what}",
        hint="the disk or another program changed it; restore the run directory or start a new run",
    )


# -- lines: a frame around JSON, which has no zero bytes


def _encode(fields: list[Any], offset: int) -> bytes:
    line = json.dumps(fields, separators=(",", ":")).encode()
    assert len(line) <= RECORD_BYTES_MAX, len(line)
    return frames.encode(line, offset)


def _lines(data: bytes) -> Iterator[tuple[list[Any], int]]:
    """Each line of the log with the offset of its end, up to a torn tail. Raises IntegrityError for damage."""
    for line, end in frames.decode(data, body_bytes_max=RECORD_BYTES_MAX):
        try:
            fields = json.loads(line)
        except ValueError as error:
            raise IntegrityError(f"the record that ends at byte {end} is not JSON") from error
        if not isinstance(fields, list) or not fields:
            raise IntegrityError(f"the record that ends at byte {end} is not a record")
        yield fields, end


# -- records


def _record_fields(record: Record) -> list[Any]:
    if isinstance(record, Put):
        return ["put", record.key, encode_bytes(record.value), record.lease, record.revision]
    if isinstance(record, Delete):
        return ["delete", record.key, record.revision]
    if isinstance(record, Grant):
        return ["grant", record.lease, record.ttl_s]
    return ["end", record.lease, record.revision]


def _decode_record(fields: list[Any]) -> Record:
    match fields:
        case ["put", key, value, lease, revision]:
            return Put(decode_text(key), decode_bytes(value), decode_integer(lease), decode_integer(revision))
        case ["delete", key, revision]:
            return Delete(decode_text(key), decode_integer(revision))
        case ["grant", lease, ttl_s]:
            return Grant(decode_integer(lease), decode_seconds(ttl_s))
        case ["end", lease, revision]:
            return LeaseEnd(decode_integer(lease), decode_integer(revision))
    raise ProtocolError(f"no such record: {str(fields)[:80]}")


def _image_fields(image: Image) -> Iterator[list[Any]]:
    yield ["image", FORMAT, image.revision, image.next_lease, len(image.leases), len(image.entries)]
    for lease, ttl_s in image.leases:
        yield ["lease", lease, ttl_s]
    for entry in image.entries:
        yield ["entry", *encode_entry(entry)]


def _read_image(lines: Iterator[tuple[list[Any], int]]) -> tuple[Image, int]:
    """The image that a log begins with, and the offset of its end. It is never torn: see `_rewrite`."""

    end = 0

    def expect(kind: str, width: int) -> list[Any]:
        nonlocal end
        fields, end = next(lines, ([""], end))
        if fields[0] != kind or len(fields) != width + 1:
            raise IntegrityError(f"no whole {kind} record before byte {end}")
        return fields[1:]

    form, revision, next_lease, leases, entries = map(decode_integer, expect("image", 5))
    if form != FORMAT:
        raise IntegrityError(f"it has format {form}; this version of Holdfast reads {FORMAT}")
    granted = []
    for _ in range(leases):
        lease, ttl_s = expect("lease", 2)
        granted.append((decode_integer(lease), decode_seconds(ttl_s)))
    held: list[Entry] = [decode_entry(expect("entry", 5)) for _ in range(entries)]
    return Image(revision, next_lease, tuple(granted), tuple(held)), end
