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


def _places(path: Path, count: int) -> list[int]:
    ends = [end for _, end in frames.decode(path.read_bytes(), body_bytes_max=RECORD_BYTES_MAX)]
    return ends[:count]  # the federation comes first, so a frame's end is where the next record begins


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
        known, records, self._size = read_chain(path)
        self.last = records[-1] if records else None
        self._places = _places(path, len(records))  # where each record's frame begins: the records stay on disk
        if known.realm != federation.realm:
            raise ConfigError(
                f"{path} is the chain of another federation, or of this one with other participants",
                hint="give each federation a directory of its own",
            )
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        os.ftruncate(self._file, self._size)
        os.fsync(self._file)
        sync_directory(directory)

    def read(self, first: int, most: int) -> tuple[Record, ...]:
        """Records from this round on."""
        places = self._places[first - 1 : first - 1 + most] if first >= 1 else []
        return tuple([self._record_at(place) for place in places])

    def _record_at(self, place: int) -> Record:
        header = os.pread(self._file, frames.HEADER.size, place)
        length = frames.HEADER.unpack(header)[0]
        body = os.pread(self._file, length, place + frames.HEADER.size)
        if frames.encode(body, place)[: len(header)] != header:
            raise IntegrityError(f"the record at byte {place} of the chain of rounds is not what was written")
        return decode(frames.unmask(body), _RECORDS)

    def append(self, record: Record) -> None:
        assert record.header.round == len(self._places) + 1, record.header
        frame = frames.encode(frames.mask(encode(record), self._size), self._size)
        try:
            write_all(self._file, frame)
            os.fdatasync(self._file)
        except OSError as error:
            raise StorageError(
                f"the chain of rounds cannot be written: {error.strerror}", hint="look at the disk"
            ) from error
        self._places.append(self._size)
        self._size += len(frame)
        self.last = record

    def close(self) -> None:
        os.close(self._file)
