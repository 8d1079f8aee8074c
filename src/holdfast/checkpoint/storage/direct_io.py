"""Whole files to and from a disk, past the kernel's cache where the file system allows it.

A checkpoint is written once and seldom read. Through the cache its gigabytes displace what training uses and arrive
at the disk in bursts (1.5 to 7.8 s for a gigabyte where a direct write takes 0.6 to 0.9); written directly, in large
blocks, they take a steady time. Memory that is not aligned is written directly too, by way of one block that is.
Python lets go of its lock during each block.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os

import numpy as np

BLOCK_BYTES = 8 << 20
ALIGNMENT = 4096  # of address, offset and length: what every disk and file system is content with
DIRECT_BYTES_MIN = 1 << 20  # below, one write through the cache costs less than the way past it

# What a file system says that cannot do it, as opposed to one that has failed.
UNSUPPORTED = frozenset({errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS})

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def write_whole(file: int, data: memoryview) -> None:
    """Make an empty file hold these bytes, durably."""
    done = 0
    if len(data) >= DIRECT_BYTES_MIN:
        _reserve(file, len(data))
        if _set_direct(file, True):
            done = _write_direct(file, data)
            _set_direct(file, False)
    while done < len(data):
        done += os.pwrite(file, data[done : done + BLOCK_BYTES], done)
    os.fsync(file)


def read_whole(file: int, memory: memoryview, offset: int) -> int:
    """Fill `memory` from `offset` on; how many bytes there were."""
    lead = -offset % ALIGNMENT  # up to where direct reading may begin
    direct_end = len(memory) - (offset + len(memory)) % ALIGNMENT
    done = 0
    if len(memory) >= DIRECT_BYTES_MIN and (_address(memory) + lead) % ALIGNMENT == 0:
        done = _read_cached(file, memory[:lead], offset)
        if done == lead and _set_direct(file, True):
            done += _read_direct(file, memory[lead:direct_end], offset + lead)
            _set_direct(file, False)
    return done + _read_cached(file, memory[done:], offset + done)


def _write_direct(file: int, data: memoryview) -> int:
    """As far as whole units of alignment go; or less, where direct writing turns out not to work."""
    done, end = 0, len(data) // ALIGNMENT * ALIGNMENT
    aligned = memoryview(mmap.mmap(-1, BLOCK_BYTES)) if _address(data) % ALIGNMENT else None
    while done < end and done % ALIGNMENT == 0:
        block = data[done : min(done + BLOCK_BYTES, end)]
        if aligned is not None:
            # numpy copies without Python's lock.
            np.copyto(np.frombuffer(aligned[: len(block)], np.uint8), np.frombuffer(block, np.uint8))
            block = aligned[: len(block)]
        try:
            done += os.pwrite(file, block, done)
        except OSError as error:
            if error.errno in UNSUPPORTED:
                break
            raise
    return done


def _read_direct(file: int, memory: memoryview, offset: int) -> int:
    done = 0
    while done < len(memory) and done % ALIGNMENT == 0:
        try:
            count = os.preadv(file, [memory[done : done + BLOCK_BYTES]], offset + done)
        except OSError as error:
            if error.errno in UNSUPPORTED:
                break
            raise
        if count == 0:
            break
        done += count
    return done


def _read_cached(file: int, memory: memoryview, offset: int) -> int:
    done = 0
    while done < len(memory):
        count = os.preadv(file, [memory[done : done + BLOCK_BYTES]], offset + done)
        if count == 0:
            break
        done += count
    return done


def _address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def _reserve(file: int, size: int) -> None:
    """Have the room before the first block, so that a full disk says so at once and blocks lie together."""
    while _libc.fallocate(file, 0, 0, size) != 0:
        number = ctypes.get_errno()
        if number in UNSUPPORTED:
            return
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))


def _set_direct(file: int, on: bool) -> bool:
    """Whether it was possible."""
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT if on else flags & ~os.O_DIRECT)
    except OSError as error:
        if error.errno in UNSUPPORTED:
            return False
        raise
    return True
