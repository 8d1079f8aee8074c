"""Frames: bytes in a file that is only appended to, each with a length and a checksum.

A frame is a header (length, check of the header, checksum) and a body. A frame is synced before the next one is
written, so only the last one can be torn: it is cut short, or sectors of it were never written and are zeros. The
header has a check of its own, so that a damaged length cannot pass for a cut. Anything else that is wrong is damage.

For that a sector of a body must never be zeros where it was written. Text has none. Bodies of any bytes are masked:
their first byte says with which of some patterns the rest is combined, so that no sector of it is zeros.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import pairwise

import xxhash

from holdfast.core.errors import IntegrityError

SECTOR_BYTES = 512
HEADER = struct.Struct("<IIQ")  # length, check of (offset, length), checksum of the body
_PATTERNS = 255


def encode(body: bytes, offset: int) -> bytes:
    """The frame of a body that comes to stand at this offset of its file."""
    return HEADER.pack(len(body), _header_check(offset, len(body)), xxhash.xxh3_64_intdigest(body)) + body


def decode(data: bytes, *, body_bytes_max: int) -> Iterator[tuple[bytes, int]]:
    """Each body of a file with the offset of its frame's end, up to a torn tail. Raises IntegrityError for damage."""
    offset = 0
    while len(data) - offset >= HEADER.size:
        length, check, checksum = HEADER.unpack_from(data, offset)
        start, end = offset + HEADER.size, offset + HEADER.size + length
        if length > body_bytes_max or check != _header_check(offset, length):
            if any(data[offset:]):
                raise IntegrityError(f"the record at byte {offset} has a damaged header")
            return  # the file grew, and the power went before its data arrived
        if end > len(data):
            return
        body = data[start:end]
        if xxhash.xxh3_64_intdigest(body) != checksum:
            if end == len(data) and _lacks_a_sector(data, start, end):
                return
            raise IntegrityError(f"the record at byte {offset} does not match its checksum")
        yield body, end
        offset = end


def mask(content: bytes, offset: int) -> bytes:
    """A body that holds any bytes. `offset`: of the frame, since sectors are the file's."""
    start = offset + HEADER.size
    for pattern in range(_PATTERNS + 1):
        body = bytes([pattern]) + _combine(content, pattern)
        if 0 not in body or not _lacks_a_sector(bytes(start % SECTOR_BYTES) + body, start % SECTOR_BYTES, None):
            return body
    raise IntegrityError("these bytes are made to look like sectors that were never written, in every way there is")


def unmask(body: bytes) -> bytes:
    return _combine(body[1:], body[0])


def _combine(content: bytes, pattern: int) -> bytes:
    if pattern == 0 or not content:
        return content
    unit = xxhash.xxh3_64_digest(bytes([pattern]))
    repeated = (unit * (len(content) // len(unit) + 1))[: len(content)]
    return (int.from_bytes(content, "little") ^ int.from_bytes(repeated, "little")).to_bytes(len(content), "little")


def _header_check(offset: int, length: int) -> int:
    return xxhash.xxh32_intdigest(struct.pack("<QI", offset, length))


def _lacks_a_sector(data: bytes, start: int, end: int | None) -> bool:
    """Whether some sector of the body that stands here is zeros."""
    end = len(data) if end is None else end
    edges = [start, *range(start - start % SECTOR_BYTES + SECTOR_BYTES, end, SECTOR_BYTES), end]
    return any(data.count(0, a, b) == b - a for a, b in pairwise(edges) if b > a)
