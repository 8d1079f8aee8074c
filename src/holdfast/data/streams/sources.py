"""Sources of samples: files of which sample n can be read by itself. Lines, tar shards, and tokens.

A source has a length and `read(number)`. `identity` says what makes it another one for the run: the file's base name,
size and some of its content, not its path, which may differ from host to host. Files are opened when they are read, at
most `_OPEN_MAX` at a time in a process, and read by position, so that forked loader processes do not disturb each
other. Owns these open files.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy
import torch

from holdfast.core.errors import ConfigError
from holdfast.data.streams.block_order import Numbers
from holdfast.data.streams.data_files import UNCHANGED, DataFile
from holdfast.data.streams.index_files import kept_index
from holdfast.data.streams.tar_members import NotATar, key_and_part, members

_OPEN_MAX = 64
_AT_ONCE = 1 << 22  # bytes in which lines are looked for at a time
_STARTS_AT_ONCE = 1 << 16  # samples of a tar whose places are written at a time


class Source(Protocol):
    """What a stream reads from. A class of your own with these is as good as those here."""

    @property
    def identity(self) -> tuple[Any, ...]:
        """Numbers and words that are the same in every worker that has the same data."""

    def __len__(self) -> int: ...

    def read(self, number: int) -> Any:
        """Sample `number`, the same whenever it is asked for."""


class OpenFiles:
    """Files that are open for reading in this process, the last used ones."""

    def __init__(self) -> None:
        self._files: dict[DataFile, int] = {}

    def read(self, file: DataFile, start: int, stop: int) -> bytes:
        descriptor = self._files.get(file)
        if descriptor is None:
            while len(self._files) >= _OPEN_MAX:
                os.close(self._files.pop(next(iter(self._files))))
            descriptor = self._files[file] = self._opened(file, stop)
        found = os.pread(descriptor, stop - start, start)
        while len(found) < stop - start:
            more = os.pread(descriptor, stop - start - len(found), start + len(found))
            if not more:
                raise ConfigError(
                    f"{file.path} ends at byte {start + len(found)}, and its index knows samples up to byte {stop}",
                    hint=UNCHANGED,
                )
            found += more
        return found

    def _opened(self, file: DataFile, stop: int) -> int:
        """The file that the source has indexed, not one that has come to its path since."""
        descriptor = os.open(file.path, os.O_RDONLY | os.O_CLOEXEC)
        if not file.is_in(descriptor) and os.fstat(descriptor).st_size >= stop:  # where it is too short, that is said
            os.close(descriptor)
            raise file.changed()
        return descriptor


_FILES = OpenFiles()


class _Indexed:
    """A file whose samples lie one after the other, sample n from start n to start n+1."""

    _kind = ""

    def __init__(self, path: str | os.PathLike[str], *, index: str | os.PathLike[str] | None = None) -> None:
        self.file = DataFile.found(Path(path))
        self.path = self.file.path
        self._directory = None if index is None else Path(index)
        self._starts = self._open()

    def _open(self) -> Numbers:
        return kept_index(self.path, self._kind, self._directory, self._find)

    def _find(self) -> Iterator[Numbers]:
        raise NotImplementedError

    @property
    def identity(self) -> tuple[Any, ...]:
        return (type(self).__name__, *self.file.identity, len(self))

    def __len__(self) -> int:
        return len(self._starts) - 1

    def _bytes(self, number: int) -> bytes:
        return _FILES.read(self.file, int(self._starts[number]), int(self._starts[number + 1]))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_starts": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.file.check()
        self._starts = self._open()


class Lines(_Indexed):
    """A file with one sample a line: text, JSON lines. A sample is the line's bytes. Empty lines are none."""

    _kind = "lines"

    def read(self, number: int) -> bytes:
        return self._bytes(number).rstrip(b"\r\n")

    def _find(self) -> Iterator[Numbers]:
        start = done = 0
        blank = True  # of the line that is not at its end yet: it has nothing, or carriage returns only
        with self.path.open("rb") as file:
            while chunk := file.read(_AT_ONCE):
                data = numpy.frombuffer(chunk, dtype=numpy.uint8)
                ends = numpy.flatnonzero(data == ord("\n"))
                if len(ends):
                    begins = numpy.concatenate(([0], ends[:-1] + 1))
                    full = ends > begins
                    for line in numpy.flatnonzero(full & (data[begins] == ord("\r"))).tolist():
                        full[line] = bool(chunk[begins[line] : ends[line]].strip(b"\r"))
                    full[0] |= not blank
                    starts = begins + done
                    starts[0] = start
                    yield starts[full]
                    start, blank = done + int(ends[-1]) + 1, True
                blank = blank and not chunk[start - done if len(ends) else 0 :].strip(b"\r")
                done += len(chunk)
        yield numpy.array([done] if blank else [start, done], dtype=numpy.int64)


class Tar(_Indexed):
    """A tar file, not compressed, in which files `key.part` that follow each other are one sample, as in WebDataset.

    A sample is a dict of bytes by part, such as {"__key__": "0017", "jpg": b"…", "cls": b"3"}.
    """

    _kind = "tar"

    def read(self, number: int) -> dict[str, Any]:
        data = self._bytes(number)
        found: dict[str, Any] = {}
        for member in members(lambda start, stop: data[start:stop], len(data)):
            named = key_and_part(member.name)
            if named is not None:
                found.setdefault("__key__", named[0])
                found[named[1]] = data[member.start : member.stop]
        return found

    def _find(self) -> Iterator[Numbers]:
        starts: list[int] = []
        key, end = None, 0
        parts: set[str] = set()
        try:
            for member in members(lambda start, stop: _FILES.read(self.file, start, stop), self.file.size):
                named = key_and_part(member.name)
                if named is not None and named[0] != key:
                    key = named[0]
                    starts.append(member.header)
                    parts.clear()
                if named is not None and named[1] in parts:
                    raise ConfigError(
                        f"{self.path} has {member.name} twice in a row of files with one key, which are one sample",
                        hint="give each sample a key of its own, or put another sample between the two",
                    )
                parts.update(named[1:] if named is not None else ())
                end = member.end
                if len(starts) >= _STARTS_AT_ONCE:
                    yield numpy.array(starts, dtype=numpy.int64)
                    starts = []
        except NotATar as error:
            raise ConfigError(
                f"{self.path} is no tar file that can be read by position: {error}",
                hint="a stream's tar files are whole and not compressed: unpack .tar.gz with gunzip",
            ) from error
        yield numpy.array([*starts, end], dtype=numpy.int64)


class Tokens:
    """Tokens one after the other, in a .npy file or as bare numbers of type `dtype`, mapped into memory.

    Sample n is the `length` tokens from n * length on, and `overlap` more, as 64-bit integers: with overlap=1 the
    inputs are sample[:-1] and what follows them is sample[1:], and each token is predicted once in an epoch. The last
    tokens, too few for a sample, are left out.
    """

    def __init__(self, path: str | os.PathLike[str], *, length: int, dtype: str = "uint16", overlap: int = 0) -> None:
        if type(length) is not int or length < 1 or type(overlap) is not int or overlap < 0:
            raise ConfigError(
                f"the tokens have length={length!r:.40} and overlap={overlap!r:.40}",
                hint="length counts the tokens of a sample, and overlap those that the next one has as well: 0 or 1",
            )
        self.file = DataFile.found(Path(path))
        self.path, self._length, self._overlap, self._type = self.file.path, length, overlap, dtype
        self._tokens = self._open()

    def _open(self) -> numpy.ndarray[Any, Any]:
        try:
            if self.path.suffix == ".npy":
                found = numpy.load(self.path, mmap_mode="r", allow_pickle=False)
            else:
                found = numpy.memmap(self.path, dtype=self._type, mode="r")
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(
                f"{self.path} cannot be mapped as tokens of {self._type} ({error})",
                hint='write them with array.tofile(path) and say dtype="uint16", or with numpy.save to a .npy file',
            ) from error
        if found.ndim != 1 or found.dtype.kind not in "iu":
            raise ConfigError(
                f"{self.path} has {found.ndim} dimensions of {found.dtype}", hint="a token file is a row of integers"
            )
        return numpy.asarray(found)

    @property
    def identity(self) -> tuple[Any, ...]:
        return ("Tokens", *self.file.identity, str(self._tokens.dtype), self._length, self._overlap)

    def __len__(self) -> int:
        return max(0, (len(self._tokens) - self._overlap) // self._length)

    def read(self, number: int) -> torch.Tensor:
        start = number * self._length
        return torch.from_numpy(self._tokens[start : start + self._length + self._overlap].astype(numpy.int64))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tokens": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.file.check()
        self._tokens = self._open()
