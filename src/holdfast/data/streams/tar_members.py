"""The members of a tar file, from the headers alone. Pure: what reads the bytes is passed in.

Of the format's dialects it knows ustar, GNU long names, and pax names and sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

_BLOCK = 512
_REGULAR = (b"0", b"\0", b"7")
_NAME_BYTES_MAX = 1 << 20  # of a pax header or a long name


class NotATar(Exception):
    """The bytes are no tar file, or not all of one."""


@dataclass(frozen=True)
class TarMember:
    """A file in it. `header`: where its headers begin; `end`: where the next one's do."""

    name: str
    header: int
    start: int
    stop: int
    end: int


def members(read: Callable[[int, int], bytes], size: int) -> Iterator[TarMember]:
    """The regular files among the first `size` bytes. `read(start, stop)` gives bytes."""
    at = first = 0
    name, length_said = "", -1
    while at + _BLOCK <= size:
        header = read(at, at + _BLOCK)
        if header[0] == 0 and header == bytes(_BLOCK):
            return
        kind, length = header[156:157], _number(header[124:136])
        if int(header[148:156].strip(b" \0") or b"0", 8) != sum(header) - sum(header[148:156]) + 8 * 32:
            raise NotATar(f"the header at byte {at} has another checksum")
        start = at + _BLOCK
        if kind in _REGULAR and length_said >= 0:
            length = length_said
        at = start + -(-length // _BLOCK) * _BLOCK
        if start + length > size:
            raise NotATar(f"it ends in the middle of the file whose header is at byte {first}")
        if kind in (b"x", b"L"):
            if length > _NAME_BYTES_MAX:
                raise NotATar(f"the name at byte {start} has {length} bytes")
            said = read(start, start + length)
            if kind == b"L":
                name = said.rstrip(b"\0").decode(errors="surrogateescape")
            else:
                records = _pax(said)
                name = records.get("path", name)
                length_said = int(records.get("size", length_said))
            continue
        if kind in _REGULAR:
            yield TarMember(name or _short_name(header), first, start, start + length, at)
        if kind not in (b"g", b"K"):
            name, length_said = "", -1
        first = at


def key_and_part(name: str) -> tuple[str, str] | None:
    """What comes before the first dot of a file's name, with its directory, and what comes after it."""
    directory, slash, base = name.rpartition("/")
    key, dot, part = base.partition(".")
    return (directory + slash + key, part) if key and dot else None


def _number(field: bytes) -> int:
    if field[0] & 0x80:  # too large for octal digits
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
    try:
        return int(field.strip(b" \0") or b"0", 8)
    except ValueError:
        raise NotATar(f"{field!r} is no size") from None


def _short_name(header: bytes) -> str:
    name = header[:100].partition(b"\0")[0]
    if header[257:263] == b"ustar\0" and header[345]:
        name = header[345:500].partition(b"\0")[0] + b"/" + name
    return name.decode(errors="surrogateescape")


def _pax(data: bytes) -> dict[str, str]:
    """Records of "length key=value\n"."""
    found = {}
    while data:
        length, _, _ = data.partition(b" ")
        if not length.isdigit() or not 0 < int(length) <= len(data):
            raise NotATar("a pax header has no length")
        key, _, value = data[len(length) + 1 : int(length) - 1].partition(b"=")
        found[key.decode(errors="replace")] = value.decode(errors="surrogateescape")
        data = data[int(length) :]
    return found
