"""The memory in which a worker holds its parts of a save, and how its neighbours on the host get at it.

It has no name, counts against no limit of /dev/shm, and is gone when no process has it. A small file in the run
directory, `save_buffers/w3.2.json`, says where it is: the process, the number of its descriptor, and what that is
called. Who has opened it keeps the bytes when that process dies.

So the workers of one host need each part only once. The record at the front says which save is whole in it, and none
while one is copied: who reads a part and then finds the same save there as before has read it whole.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import struct
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from holdfast.checkpoint.format.parts import PAGE_BYTES, view_of

FOLDER = "save_buffers"
OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
LARGE_BYTES = 2 << 20  # a large page
USED_BYTES = 16 << 20
NOTE_BYTES_MAX = 4096
POLL_S = 0.001
_RECORD = struct.Struct("=8sQQ")  # and a checksum
_CHECKSUM = struct.Struct("=I")
_MARK = b"HFSAVEB1"
_COLLAPSE = 25  # MADV_COLLAPSE: large pages now, for memory that is shared too


def note_path(run_dir: Path, worker: str) -> Path:
    return run_dir / FOLDER / f"{worker}.json"


class SaveBuffer:
    """The owner's side. With `note`, others can find it."""

    def __init__(self, note: Path | None = None) -> None:
        self._note = note
        self._name = f"holdfast-{secrets.token_hex(8)}"
        self._file: int | None = None
        self._start = 0  # in the file, of the buffer
        self._buffer: torch.Tensor | None = None

    @property
    def size(self) -> int:
        return 0 if self._buffer is None else len(self._buffer)

    def make(self, size: int, *, in_a_hurry: Callable[[], bool]) -> torch.Tensor:
        """So many bytes at least, all of which were used before, so that no use of them has to wait for its pages.

        Large pages make each later use cheaper: a direct write takes half the time in the kernel. But a machine that
        has to ask the one under it for them needs seconds for a gigabyte. When somebody waits, the rest gets ordinary
        ones.
        """
        if self._buffer is None or len(self._buffer) < size:
            self._buffer = None  # first: there should never be two
            memory = self._map(-(-max(size, 1) // PAGE_BYTES) * PAGE_BYTES)
            buffer = torch.frombuffer(memory, dtype=torch.uint8)
            self._say(0)
            self._tell()
            _use(memory, buffer, in_a_hurry)
            self._buffer = buffer
        return self._buffer

    def begin(self) -> None:
        """From here on nothing in it is whole."""
        self._say(0)

    def done(self, mark: int) -> None:
        """The parts that the owner writes in the save with this mark are in it."""
        self._say(mark)

    def close(self) -> None:
        """Nobody finds it any more. The memory goes when nobody uses it."""
        if self._note is not None:
            with suppress(OSError):
                self._note.unlink(missing_ok=True)

    def _map(self, size: int) -> mmap.mmap:
        """Where memory files are not to be had (a limit on files' sizes holds for them too), memory of its own."""
        try:
            return self._map_shared(size)
        except (OSError, AttributeError):
            self.close()
            if self._file is not None:
                os.close(self._file)
                self._file = None
            return mmap.mmap(-1, size)

    def _map_shared(self, size: int) -> mmap.mmap:
        if self._file is None:
            self._file = os.memfd_create(self._name)
        os.ftruncate(self._file, 2 * LARGE_BYTES + size)
        if OVERCOMMIT.read_text().strip() == "2":  # to use what is not there would end the process
            os.posix_fallocate(self._file, 0, 2 * LARGE_BYTES + size)
        # Where the kernel has put it once it does again. Large pages must lie in the file as they do in memory.
        once = mmap.mmap(self._file, size, offset=LARGE_BYTES)
        self._start = LARGE_BYTES + torch.frombuffer(once, dtype=torch.uint8).data_ptr() % LARGE_BYTES
        once.close()
        return mmap.mmap(self._file, size, offset=self._start)

    def _say(self, mark: int) -> None:
        if self._file is not None:
            record = _RECORD.pack(_MARK, mark, self._start)
            os.pwrite(self._file, record + _CHECKSUM.pack(zlib.crc32(record)), 0)

    def _tell(self) -> None:
        """Who cannot be told copies for itself."""
        if self._note is None or self._file is None:
            return
        with suppress(OSError):
            self._note.parent.mkdir(exist_ok=True)
            partial = self._note.with_suffix(".new")
            partial.write_text(json.dumps({"pid": os.getpid(), "file": self._file, "name": self._name}))
            partial.replace(self._note)


class NeighbourBuffer:
    """The reader's side: the save buffer of another worker of this host."""

    def __init__(self, file: int) -> None:
        self._file = file

    @classmethod
    def find(cls, note: Path) -> NeighbourBuffer | None:
        """None: it has none yet, is gone, or the kernel does not let us."""
        try:
            with note.open("rb") as opened:
                said = json.loads(opened.read(NOTE_BYTES_MAX))
            file = os.open(f"/proc/{int(said['pid'])}/fd/{int(said['file'])}", os.O_RDONLY | os.O_CLOEXEC)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return None
        with suppress(OSError):
            if Path(f"/proc/self/fd/{file}").readlink() == Path(f"/memfd:{said['name']} (deleted)"):
                return cls(file)
        os.close(file)  # the process is another by now
        return None

    def holds(self, mark: int) -> bool:
        return self._found(mark) is not None

    def wait(self, mark: int, timeout_s: float) -> bool:
        """Until it holds the parts that its owner writes in this save; False: it does not in time."""
        deadline = time.monotonic() + timeout_s
        while not self.holds(mark):
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_S)
        return True

    def read(self, mark: int, offset: int, image: torch.Tensor) -> bool:
        """What lies there of this save. False: it does not any more."""
        start, view, done = self._found(mark), view_of(image), 0
        if start is None:
            return False
        while done < len(view):
            count = os.preadv(self._file, [view[done:]], start + offset + done)
            if count == 0:
                return False
            done += count
        return self._found(mark) == start

    def close(self) -> None:
        os.close(self._file)

    def _found(self, mark: int) -> int | None:
        data = os.pread(self._file, _RECORD.size + _CHECKSUM.size, 0)
        record, checksum = data[: _RECORD.size], data[_RECORD.size :]
        if len(checksum) < _CHECKSUM.size or zlib.crc32(record) != _CHECKSUM.unpack(checksum)[0]:
            return None  # just being written
        kind, held, start = _RECORD.unpack(record)
        return start if kind == _MARK and held == mark and mark else None


def _use(memory: mmap.mmap, buffer: torch.Tensor, in_a_hurry: Callable[[], bool]) -> None:
    first = -buffer.data_ptr() % LARGE_BYTES  # where the first whole large page begins
    buffer[:first].zero_()
    large = True
    for start in range(first, len(buffer), USED_BYTES):
        some = buffer[start : start + USED_BYTES]
        whole = len(some) - len(some) % LARGE_BYTES
        large = large and not in_a_hurry()
        if large and whole:
            some[:whole:LARGE_BYTES].zero_()  # where nothing is, nothing can be made large
            try:
                memory.madvise(_COLLAPSE, start, whole)
            except OSError:  # an older kernel, or it has none left
                large = False
        some.zero_()
