"""What the machine can do with the bytes of a state: copy them in warm memory, write them durably, read them."""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

BLOCK_BYTES = 8 << 20
PAGE_BYTES = 4096
READERS = 8
COPIES = 3  # a copy takes so little that several cost nothing


class Limits:
    """Owns two states' worth of memory, touched, and a file of that size while it measures."""

    def __init__(self, directory: Path, size: int) -> None:
        self._path = directory / "limit"
        self._source = _touched(size, 1)
        self._target = _touched(size, 2)
        self._times: dict[str, list[float]] = {}

    def measure(self, *, buffered: bool = False) -> None:
        for _ in range(COPIES):
            self._time("copy", self._copy)
        self._time("direct_write", self._write_directly)
        self._time("direct_read", lambda: self.read_files([self._path]))
        if buffered:
            self._time("buffered_write", self._write_buffered)
        self._path.unlink()

    def read_files(self, files: Sequence[Path]) -> float:
        """One after the other, past the cache, to warm memory; in seconds."""
        began = time.perf_counter()
        place = memoryview(self._target)[:BLOCK_BYTES]
        for path in files:
            file = os.open(path, os.O_RDONLY | os.O_DIRECT)
            try:
                while os.readv(file, [place]) == len(place):
                    pass
            finally:
                os.close(file)
        return time.perf_counter() - began

    def read_files_anew(self, files: Sequence[Path]) -> float:
        """To memory that was never used, by several threads: with one the disk would wait while pages are made."""
        began = time.perf_counter()
        sizes = [path.stat().st_size for path in files]
        places = [mmap.mmap(-1, -(-size // PAGE_BYTES) * PAGE_BYTES) for size in sizes]

        def read(path: Path, memory: mmap.mmap) -> None:
            file = os.open(path, os.O_RDONLY | os.O_DIRECT)
            try:
                for start in range(0, len(memory), BLOCK_BYTES):
                    os.preadv(file, [memoryview(memory)[start : start + BLOCK_BYTES]], start)
            finally:
                os.close(file)

        with ThreadPoolExecutor(READERS) as pool:
            list(pool.map(read, files, places))
        return time.perf_counter() - began

    @staticmethod
    def forget(files: Sequence[Path]) -> None:
        """So that nothing of them is read from the cache."""
        for path in files:
            file = os.open(path, os.O_RDONLY)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)

    def figures(self) -> dict[str, float]:
        found = {}
        for name, times in self._times.items():
            found |= {f"limit_{name}_s": statistics.median(times)}
            found |= {f"limit_{name}_min_s": min(times), f"limit_{name}_max_s": max(times)}
        return found

    def _time(self, name: str, act: Callable[[], object]) -> None:
        began = time.perf_counter()
        act()
        self._times.setdefault(name, []).append(time.perf_counter() - began)

    def _copy(self) -> None:
        np.copyto(self._target, self._source)

    def _write_directly(self) -> None:
        self._write(os.O_DIRECT)

    def _write_buffered(self) -> None:
        self._write(0)

    def _write(self, flags: int) -> None:
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | flags, 0o600)
        try:
            data = memoryview(self._source)
            for start in range(0, len(data), BLOCK_BYTES):
                block = data[start : start + BLOCK_BYTES]
                assert os.write(file, block) == len(block)
            os.fsync(file)
        finally:
            os.close(file)


def _touched(size: int, value: int) -> np.ndarray:
    assert size % PAGE_BYTES == 0, "what is written directly must be whole pages"
    array = np.frombuffer(mmap.mmap(-1, size), dtype=np.uint8)
    array.fill(value)
    return array
