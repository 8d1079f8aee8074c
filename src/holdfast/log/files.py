"""Files that are appended to and must survive a power cut: writing all of it, syncing a directory, locking it."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def is_full(error: OSError) -> bool:
    return error.errno in _FULL


def write_all(file: int, data: bytes | bytearray) -> None:
    left = memoryview(bytes(data))
    while left:
        left = left[os.write(file, left) :]


def sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock_directory(directory: Path, name: str = "lock") -> int:
    """A descriptor that holds the lock until it is closed. Raises BlockingIOError while another process holds it."""
    lock = os.open(directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise
    return lock
