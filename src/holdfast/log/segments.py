"""A log on disk: entries by index, in files that are only appended to, with one sync for many entries.

A file (a segment) begins with a head: which one it is, where the one before it ends, how far the log had come, and the
note. Then come frames (frames.py), one for each commit, with everything that was added since the last one. An entry
with an index that is there already takes the place of that one and of all that come after. Old segments are removed
as a whole, once all of their entries are dropped or replaced.

What `commit` returned for is on disk. If it raises, the log is as it was before, and everything that was added since
the last commit is forgotten. After a failed sync the kernel may call lost pages clean: then the next commit begins a
new segment, whose head says up to where the old one counts.

The note is some bytes that belong to the log as a whole: the newest one counts.

A Segments belongs to one thread. Between processes a lock on the directory keeps a second one out.
"""

from __future__ import annotations

import os
import struct
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from holdfast.core.errors import ConfigError, IntegrityError, StorageError, StorageUnavailable
from holdfast.log import frames
from holdfast.log.files import is_full, lock_directory, sync_directory, write_all

FORMAT = 1
SEGMENT_BYTES_MAX = 64 * 1024 * 1024
FRAME_BYTES_MAX = 2**31  # a commit holds less than this
SUFFIX = ".segment"
NEW_NAME = "segment.new"

_HEAD = struct.Struct("<IQQQ")  # format, number, bytes of the segment before that count, the last index before this one
_RECORD = struct.Struct("<BQI")  # kind, index, length
_ENTRY, _NOTE, _RESTART = 1, 2, 3


@dataclass(frozen=True, slots=True)
class _Place:
    segment: int
    offset: int  # of the frame that holds the entry


class Segments:
    def __init__(self, directory: Path, lock: int, segment_bytes_max: int) -> None:
        self._directory = directory
        self._lock = lock
        self._segment_bytes_max = segment_bytes_max
        self._file = -1
        self._number = 0  # of the newest segment
        self._oldest = 1
        self._size = 0  # up to here the newest segment is whole and on disk
        self._head_bytes = 0
        self._suspect = False  # the newest segment's end cannot be trusted: the next commit begins another one
        self._places: deque[_Place] = deque()
        self.first = 1  # the index of the oldest entry; one past `last` where there is none
        self.note = b""
        self._added: list[tuple[int, int, bytes]] = []
        self._added_last = 0

    @classmethod
    def open(cls, directory: Path, *, segment_bytes_max: int = SEGMENT_BYTES_MAX) -> Segments:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            log = cls(directory, lock_directory(directory), segment_bytes_max)
        except BlockingIOError as error:
            raise ConfigError(
                f"another process has the log in {directory} open", hint="give each server a directory of its own"
            ) from error
        except OSError as error:
            raise _trouble(directory, error) from error
        try:
            (directory / NEW_NAME).unlink(missing_ok=True)
            log._read_back()
        except OSError as error:
            log.close()
            raise _trouble(directory, error) from error
        except BaseException:
            log.close()
            raise
        return log

    @property
    def last(self) -> int:
        return self.first + len(self._places) - 1

    def close(self) -> None:
        for descriptor in (self._file, self._lock):
            if descriptor >= 0:
                os.close(descriptor)
        self._file = self._lock = -1

    # -- adding

    def append(self, index: int, payload: bytes) -> None:
        """Add an entry, in the place of whatever is there from this index on. It counts once it is committed."""
        assert 1 <= index <= self._added_last + 1, (index, self._added_last)
        self._added.append((_ENTRY, index, payload))
        self._added_last = index

    def keep_note(self, note: bytes) -> None:
        self._added.append((_NOTE, 0, note))

    def restart_after(self, index: int) -> None:
        """Drop every entry: the next one comes after this index."""
        self._added.append((_RESTART, index, b""))
        self._added_last = index

    def commit(self) -> None:
        """Put all that was added on disk, with one sync. Raises StorageError, and the log is as it was."""
        added, self._added = self._added, []
        self._added_last = self.last
        if not added:
            return
        content = b"".join(_RECORD.pack(kind, index, len(payload)) + payload for kind, index, payload in added)
        try:
            full = self._size > self._head_bytes and self._size + len(content) > self._segment_bytes_max
            if full or self._suspect:
                self._begin_segment()
            frame = frames.encode(frames.mask(content, self._size), self._size)
            self._write(frame)
        except OSError as error:
            raise _trouble(self._directory, error) from error
        place = _Place(self._number, self._size)
        self._size += len(frame)
        for kind, index, payload in added:
            self._take(kind, index, payload, place)
        self._added_last = self.last

    def _write(self, frame: bytes) -> None:
        """Append and sync, or leave the segment as it was."""
        try:
            write_all(self._file, frame)
        except OSError:
            self._cut()
            raise
        try:
            os.fdatasync(self._file)
        except OSError:
            self._cut()
            self._suspect = True
            raise

    def _cut(self) -> None:
        try:
            os.ftruncate(self._file, self._size)
            os.fdatasync(self._file)
        except OSError:
            self._suspect = True

    def _take(self, kind: int, index: int, payload: bytes, place: _Place) -> None:
        if kind == _NOTE:
            self.note = payload
        elif kind == _RESTART:
            self._places.clear()
            self.first = index + 1
        else:
            if index < self.first:
                self._places.clear()
                self.first = index
            while self.last >= index:
                self._places.pop()
            self._places.append(place)

    def _begin_segment(self) -> None:
        """A new newest segment. If this fails it may be there under its name, so nothing is added to the old one."""
        self._suspect = True
        number = self._number + 1
        new = self._directory / NEW_NAME
        head = _HEAD.pack(FORMAT, number, self._size, self.last) + self.note
        frame = frames.encode(frames.mask(head, 0), 0)
        file = os.open(new, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            write_all(file, frame)
            os.fsync(file)
            new.rename(self._path(number))
            sync_directory(self._directory)
        except OSError:
            os.close(file)
            new.unlink(missing_ok=True)
            raise
        if self._file >= 0:
            os.close(self._file)
        self._file, self._number, self._size, self._head_bytes = file, number, len(frame), len(frame)
        self._suspect = False

    # -- dropping

    def drop_through(self, index: int) -> None:
        """Entries up to this index are not needed any more. Files are removed where none of their entries is left."""
        while self._places and self.first <= index:
            self._places.popleft()
            self.first += 1
        needed = min((place.segment for place in self._places), default=self._number)
        while self._oldest < needed:
            try:
                self._path(self._oldest).unlink(missing_ok=True)
            except OSError as error:
                raise _trouble(self._directory, error) from error
            self._oldest += 1

    # -- reading

    def read(self, first: int, last: int) -> Iterator[tuple[int, bytes]]:
        """Committed entries, each checked once more as it is read."""
        assert self.first <= first and last <= self.last, (first, last, self.first, self.last)
        place, entries = None, dict[int, bytes]()
        for index in range(first, last + 1):
            if self._places[index - self.first] != place:
                place = self._places[index - self.first]
                entries = self._read_frame(place)
            yield index, entries[index]

    def _read_frame(self, place: _Place) -> dict[int, bytes]:
        path = self._path(place.segment)
        try:
            with path.open("rb") as file:
                file.seek(place.offset)
                header = file.read(frames.HEADER.size)
                length = frames.HEADER.unpack(header)[0] if len(header) == frames.HEADER.size else 0
                body = file.read(length)
        except OSError as error:
            raise _trouble(self._directory, error) from error
        if not length or frames.encode(body, place.offset)[: len(header)] != header:
            raise _damage(path, f"the record at byte {place.offset} is not what was written")
        return {index: payload for kind, index, payload in _records(frames.unmask(body)) if kind == _ENTRY}

    # -- reading back

    def _path(self, number: int) -> Path:
        return self._directory / f"{number:012d}{SUFFIX}"

    def _read_back(self) -> None:
        numbers = sorted(int(path.stem) for path in self._directory.glob(f"*{SUFFIX}"))
        if not numbers:
            self._begin_segment()
            return
        if numbers != list(range(numbers[0], numbers[-1] + 1)):
            raise _damage(self._directory, f"of the segments {numbers} one is missing")
        self._oldest = numbers[0]
        for number in numbers:
            try:
                self._read_segment(number, is_newest=number == numbers[-1])
            except IntegrityError as error:
                raise _damage(self._path(number), error.message) from error
        self._added_last = self.last
        self._file = os.open(self._path(self._number), os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        os.ftruncate(self._file, self._size)
        os.fsync(self._file)  # what was read may be only in memory yet
        sync_directory(self._directory)

    def _read_segment(self, number: int, *, is_newest: bool) -> None:
        data = self._path(number).read_bytes()
        if not is_newest:
            data = data[: self._counted_by_the_next(number)]
        bodies = frames.decode(data, body_bytes_max=FRAME_BYTES_MAX)
        body, end = next(bodies, (b"", 0))
        head = frames.unmask(body) if body else b""
        if len(head) < _HEAD.size:
            raise IntegrityError("it has no head")
        form, its_number, _, last = _HEAD.unpack_from(head)
        if form != FORMAT:
            raise IntegrityError(f"it has format {form}; this version of Holdfast reads {FORMAT}")
        if number == self._oldest:
            self.first = last + 1
        if its_number != number or last != self.last:
            raise IntegrityError(f"it begins after entry {last}, and the log before it ends at {self.last}")
        self.note = head[_HEAD.size :]
        self._head_bytes = end
        for body, frame_end in bodies:
            place = _Place(number, end)
            for kind, index, payload in _records(frames.unmask(body)):
                if kind == _ENTRY and index > self.last + 1:
                    raise IntegrityError(f"entry {index} follows entry {self.last}")
                self._take(kind, index, payload, place)
            end = frame_end
        if not is_newest and end != len(data):
            raise IntegrityError(f"it is cut off at byte {end} of {len(data)}")
        self._number, self._size = number, end

    def _counted_by_the_next(self, number: int) -> int:
        """How many bytes of this segment count: the head of the next one says so."""
        data = self._path(number + 1).read_bytes()
        body, _ = next(frames.decode(data, body_bytes_max=FRAME_BYTES_MAX), (b"", 0))
        head = frames.unmask(body) if body else b""
        if len(head) < _HEAD.size:
            raise IntegrityError("the segment after it has no head")
        counted: int = _HEAD.unpack_from(head)[2]
        if counted > self._path(number).stat().st_size:
            raise IntegrityError(f"it has lost its end: {counted} bytes of it counted")
        return counted


def _records(content: bytes) -> Iterator[tuple[int, int, bytes]]:
    position = 0
    while position < len(content):
        if len(content) - position < _RECORD.size:
            raise IntegrityError("a frame ends in the middle of a record")
        kind, index, length = _RECORD.unpack_from(content, position)
        position += _RECORD.size
        if kind not in (_ENTRY, _NOTE, _RESTART) or length > len(content) - position:
            raise IntegrityError("a frame holds what is no record")
        yield kind, index, content[position : position + length]
        position += length


def _trouble(directory: Path, error: OSError) -> StorageError:
    if is_full(error):
        return StorageUnavailable(
            f"the disk of the log in {directory} is full: {error.strerror}",
            hint="free some space there; updates are taken again as soon as there is room",
        )
    return StorageError(
        f"the disk of the log in {directory} failed: {error.strerror or error}", hint="look at the disk"
    )


def _damage(path: Path, what: str) -> IntegrityError:
    return IntegrityError(
        f"{path} is damaged: {what}",
        hint="the disk or another program changed it; remove all of the server's directory: it starts as a new replica",
    )
