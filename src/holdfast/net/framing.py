"""How messages are told apart on a stream: each is a length (4 bytes, big-endian) and so many bytes.

Whoever takes frames says how long one may be. What is longer is a ProtocolError before any memory is taken for it.
"""

from __future__ import annotations

import struct

from holdfast.core.errors import ProtocolError

LENGTH = struct.Struct(">I")


def frame(body: bytes) -> bytes:
    return LENGTH.pack(len(body)) + body


def take_frame(buffer: bytearray, bytes_max: int) -> bytearray | None:
    """Take the first frame's body out of `buffer`; None if it is not complete yet."""
    if len(buffer) < LENGTH.size:
        return None
    end = LENGTH.size + length_of(buffer, bytes_max)
    if len(buffer) < end:
        return None
    body = buffer[LENGTH.size : end]
    del buffer[:end]
    return body


def length_of(head: bytes | bytearray, bytes_max: int) -> int:
    """The length that a frame begins with."""
    length: int = LENGTH.unpack_from(head)[0]
    if length > bytes_max:
        raise ProtocolError(f"a frame of {length} bytes, which is more than {bytes_max}")
    return length
