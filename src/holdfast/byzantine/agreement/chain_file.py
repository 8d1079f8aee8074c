"""The chain of round records as one file that is only appended to: `rounds.chain`, in every server's directory.

It begins with the federation, so that the file can be verified by itself, and has one frame (log/frames.py) for each
record. A record that is appended is on disk. Reading needs no lock, so the file of a server that runs can be verified,
and copied; an end that is being written is left out.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from holdfast.byzantine.agreement.canonical import decode, encode
from holdfast.byzantine.agreement.federation import Federation
from holdfast.byzantine.agreement.statements import Record
from holdfast.core.errors import ConfigError, IntegrityError, ProtocolError, StorageError
from holdfast.log import frames
from holdfast.log.files import sync_directory, write_all

FILE = "rounds.chain"
RECORD_BYTES_MAX = 1 << 30
_RECORDS = {"Record": Record}


def read_chain(path: Path) -> tuple[Federation, list[Record], int]:
    """The federation, the records, and where the last whole one ends."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}", hint="name a rounds.chain, or a server's directory"
        ) from error
    federation, records, size = None, list[Record](), 0
    try:
        for body, end in frames.decode(data, body_bytes_max=RECORD_BYTES_MAX):
            content, size = frames.unmask(body), end
            if federation is None:
                federation = Federation.from_fields(json.loads(content))
            else:
                records.append(decode(content, _RECORDS))
    except (IntegrityError, ProtocolError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise IntegrityError(
            f"{path} is damaged: record {len(records) + 1} cannot be read ({error})",
            hint="copy the file of another server; all honest ones have the same rounds",
        ) from error
    if federation is None:
        raise ConfigError(f"{path} is no chain of rounds", hint="name a rounds.chain, or a server's directory")
    return federation, records, size


class ChainFile:
    """A server's own. Belongs to one thread."""

    def __init__(self, directory: Path, federation: Federation) -> None:
        path = directory / FILE
        is_new = not path.exists()
        if is_new:
            partial = path.with_suffix(".new")
            content = json.dumps(federation.as_fields(), sort_keys=True).encode()
            partial.write_bytes(frames.encode(frames.mask(content, 0), 0))
            partial.rename(path)
        known, self._records, self._size = read_chain(path)
        if known.realm != federation.realm:
            raise ConfigError(
                f"{path} is the chain of another federation, or of this one with other participants",
                hint="give each federation a directory of its own",
            )
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        os.ftruncate(self._file, self._size)
        os.fsync(self._file)
        sync_directory(directory)

    @property
    def last(self) -> Record | None:
        return self._records[-1] if self._records else None

    def read(self, first: int, most: int) -> tuple[Record, ...]:
        """Records from this round on."""
        return tuple(self._records[max(first - 1, 0) : max(first - 1, 0) + most]) if first >= 1 else ()

    def append(self, record: Record) -> None:
        assert record.header.round == len(self._records) + 1, record.header
        frame = frames.encode(frames.mask(encode(record), self._size), self._size)
        try:
            write_all(self._file, frame)
            os.fdatasync(self._file)
        except OSError as error:
            raise StorageError(
                f"the chain of rounds cannot be written: {error.strerror}", hint="look at the disk"
            ) from error
        self._size += len(frame)
        self._records.append(record)

    def close(self) -> None:
        os.close(self._file)
