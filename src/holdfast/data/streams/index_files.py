"""Where the samples of a file begin, found once and kept: a file of 64-bit numbers beside the data.

An index says of which data it is (size and time of change) and is made again if the data has changed. It is written to
a temporary name and renamed, so that several workers may make it at once. Where nothing can be written, it lives in a
temporary file without a name, and is made by every process. It is mapped into memory, so it takes none for long.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO

import numpy
import xxhash

from holdfast.core.errors import ConfigError
from holdfast.data.streams.block_order import Numbers

_MAGIC = 0x484F_4C44_4958_3032  # "HOLDIX02": of another layout, or other samples of the same data, another number
_HEAD = 4  # numbers before the index itself: magic, size and time of the data, how many numbers follow


def kept_index(data: Path, kind: str, directory: Path | None, build: Callable[[], Iterable[Numbers]]) -> Numbers:
    """The index of a file. `directory`: where it is kept, if not beside the data."""
    try:
        about = data.stat()
    except OSError as error:
        raise ConfigError(f"{data} cannot be read ({error.strerror})", hint="give the path of a file") from error
    identity = (_MAGIC, about.st_size, about.st_mtime_ns)
    place = _place(data, kind, directory)
    found = _read(place, identity)
    if found is not None:
        return found
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=place.parent, prefix=f".{place.name}.", delete=False) as file:
            try:
                _write(file, identity, build())
                os.fchmod(file.fileno(), 0o644)  # the data's other readers read it too
                Path(file.name).replace(place)
            except BaseException:
                with suppress(OSError):
                    Path(file.name).unlink()
                raise
        found = _read(place, identity)
    except OSError:
        found = None  # a directory that is only read, or full
    return found if found is not None else temporary_index(build)


def temporary_index(build: Callable[[], Iterable[Numbers]]) -> Numbers:
    """An index that ends with the process."""
    with tempfile.TemporaryFile() as file:
        _write(file, (_MAGIC, 0, 0), build())
        return _mapped(file)


def _place(data: Path, kind: str, directory: Path | None) -> Path:
    if directory is None:
        return data.with_name(f"{data.name}.holdfast-{kind}")
    return directory / f"{data.name}.{xxhash.xxh3_64_hexdigest(bytes(data.absolute()))}.holdfast-{kind}"


def _read(place: Path, identity: tuple[int, int, int]) -> Numbers | None:
    try:
        with place.open("rb") as file:
            head = numpy.fromfile(file, dtype=numpy.int64, count=_HEAD)
            whole = os.fstat(file.fileno()).st_size == 8 * (_HEAD + int(head[3])) if len(head) == _HEAD else False
            return _mapped(file) if whole and tuple(head[:3].tolist()) == identity else None
    except OSError:
        return None


def _write(file: IO[bytes], identity: tuple[int, int, int], pieces: Iterable[Numbers]) -> None:
    file.write(bytes(8 * _HEAD))
    count = 0
    for piece in pieces:
        file.write(numpy.ascontiguousarray(piece, dtype=numpy.int64).data)
        count += len(piece)
    file.seek(0)
    file.write(numpy.array([*identity, count], dtype=numpy.int64).data)
    file.flush()


def _mapped(file: IO[bytes]) -> Numbers:
    whole = numpy.memmap(file, dtype=numpy.int64, mode="r")
    return numpy.asarray(whole)[_HEAD:]
