"""Canonical bytes: one value has one encoding, and every encoding that is accepted has one value.

Values are whole numbers from 0 on, bytes, text, None and tuples of them. Lengths have a fixed width, so there is no
second way to write one. What is signed and what is hashed goes through `pack`; so does everything on the wire, where
dataclasses are tuples that begin with their name. `decode` builds only classes that it was given, with fields of the
declared types: nothing that is received is trusted to be what it says.
"""

from __future__ import annotations

import hashlib
import struct
import types
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from holdfast.core.errors import ProtocolError

DEPTH_MAX = 24
NUMBER_MAX = 2**63 - 1
_LENGTH = struct.Struct(">I")
_NUMBER = struct.Struct(">Q")

Plain = Any  # int | bytes | str | None | tuple of these
Kind = TypeVar("Kind")


def digest_of(content: bytes) -> bytes:
    return hashlib.sha256(content).digest()


def pack(value: Plain) -> bytes:
    parts: list[bytes] = []
    _pack(value, parts)
    return b"".join(parts)


def _pack(value: Plain, parts: list[bytes]) -> None:
    kind = type(value)
    if kind is bytes:
        parts += (b"b", _LENGTH.pack(len(value)), value)
    elif kind is str:
        data = value.encode()
        parts += (b"s", _LENGTH.pack(len(data)), data)
    elif kind is int:
        assert 0 <= value <= NUMBER_MAX, value
        parts += (b"i", _NUMBER.pack(value))
    elif value is None:
        parts.append(b"n")
    else:
        assert kind is tuple, kind
        parts += (b"t", _LENGTH.pack(len(value)))
        for one in value:
            _pack(one, parts)


def unpack(data: bytes) -> Plain:
    """The one value whose encoding this is. ProtocolError for anything else."""
    try:
        value, end = _unpack(data, 0, 0)
    except (struct.error, UnicodeDecodeError, IndexError) as error:
        raise ProtocolError("bytes that encode nothing") from error
    if end != len(data):
        raise ProtocolError("bytes behind the end of a value")
    return value


def _unpack(data: bytes, at: int, depth: int) -> tuple[Plain, int]:
    tag = data[at : at + 1]
    at += 1
    if tag == b"n":
        return None, at
    if tag == b"i":
        number = _NUMBER.unpack_from(data, at)[0]
        if number > NUMBER_MAX:
            raise ProtocolError("a number that is too large")
        return number, at + _NUMBER.size
    if tag not in (b"b", b"s", b"t") or depth > DEPTH_MAX:
        raise ProtocolError("bytes that encode nothing")
    length = _LENGTH.unpack_from(data, at)[0]
    at += _LENGTH.size
    if length > len(data) - at:
        raise ProtocolError("a length beyond the end")
    if tag != b"t":
        content = data[at : at + length]
        return (content if tag == b"b" else content.decode()), at + length
    items = []
    for _ in range(length):
        item, at = _unpack(data, at, depth + 1)
        items.append(item)
    return tuple(items), at


# -- dataclasses


def plain(value: Any) -> Plain:
    """A dataclass as a tuple: its name, and its fields in order."""
    if isinstance(value, tuple):
        return tuple([plain(one) for one in value])
    if value is None or isinstance(value, int | str | bytes):
        return value
    kind: Any = type(value)
    return (kind.__name__, *[plain(getattr(value, name)) for name in _names(kind)])


def encode(value: Any) -> bytes:
    return pack(plain(value))


def decode(data: bytes, kinds: Mapping[str, type[Kind]]) -> Kind:
    """One of these dataclasses. ProtocolError for anything else."""
    value = unpack(data)
    name = value[0] if isinstance(value, tuple) and value else None
    if not isinstance(name, str) or name not in kinds:
        raise ProtocolError(f"a message {str(name)[:20]!r}")
    kind: Any = kinds[name]
    built: Kind = _builder(kind)(value)
    return built


@cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(one.name for one in fields(kind))


@cache
def _builder(hint: Any) -> Callable[[Plain], Any]:
    """Builds a value of this type from a plain one, or raises ProtocolError."""
    if hint in (int, str, bytes, type(None)):
        return lambda value: value if type(value) is hint else _refuse(hint)
    if get_origin(hint) in (Union, types.UnionType):
        other = next(one for one in get_args(hint) if one is not type(None))
        return lambda value: None if value is None else _builder(other)(value)
    if get_origin(hint) is tuple:
        inner = get_args(hint)[0]
        assert get_args(hint)[1:] == (Ellipsis,), hint
        return lambda value: tuple([_builder(inner)(one) for one in _items(value)])
    hints, names = get_type_hints(hint), _names(hint)

    def build(value: Plain) -> Any:
        items = _items(value)
        if len(items) != len(names) + 1 or items[0] != hint.__name__:
            _refuse(hint)
        return hint(*[_builder(hints[name])(item) for name, item in zip(names, items[1:], strict=True)])

    return build


def _items(value: Plain) -> tuple[Plain, ...]:
    if not isinstance(value, tuple):
        raise ProtocolError("one value where there should be several")
    return value


def _refuse(hint: Any) -> Any:
    raise ProtocolError(f"something else than a {getattr(hint, '__name__', hint)}")
