"""What ledger clients and servers say to each other: frames of JSON, with values in base64.

The body of a frame is a JSON object, of at most FRAME_BYTES_MAX. A request names an operation and
has an id, which its reply repeats. A `read` is answered by one frame or by several, of which all but the last say
`more`. After a `watch` the server only sends: changes as they come, and now and then the revision that the watch
has reached though nothing under its prefix changed. Nothing here does IO. Whatever is malformed is a ProtocolError.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from holdfast.core.errors import (
    LeaseGone,
    LedgerError,
    LedgerRefused,
    LedgerUnavailable,
    ProtocolError,
    WatchGap,
)
from holdfast.core.words import decode_json, encode_json
from holdfast.ledger.port import Change, Entry
from holdfast.net import framing

FRAME_BYTES_MAX = 256 * 1024
LEDGER = b"ledger"  # the kind of server: see trust/handshake.py
_BATCH_BYTES = 96 * 1024  # with one more value of the largest size this still fits a frame
_INTEGER_MAX = 2**63 - 1

# operation -> the fields that its request has besides `id` and `op`
OPERATIONS = {
    "get": ("key",),
    "read": ("prefix",),
    "put": ("key", "value", "lease"),
    "compare_and_set": ("key", "value", "lease", "expected", "while_at"),
    "delete": ("key",),
    "grant": ("ttl_s",),
    "keep_alive": ("lease",),
    "revoke": ("lease",),
    "watch": ("prefix", "revision"),
}
_ERRORS = {kind.__name__: kind for kind in (LedgerUnavailable, LedgerRefused, LeaseGone, WatchGap)}


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request as it came in, every field checked for its type. Those that `op` does not have are empty."""

    op: str
    id: int = 0
    key: str = ""
    prefix: str = ""
    value: bytes = b""
    lease: int = 0
    expected: int = 0
    while_at: tuple[str, int] | None = None
    revision: int = 0
    ttl_s: float = 0.0


def frame(message: dict[str, Any]) -> bytes:
    body = encode_json(message)
    assert len(body) <= FRAME_BYTES_MAX, len(body)
    return framing.frame(body)


def take_frame(buffer: bytearray) -> dict[str, Any] | None:
    """Take the first message out of `buffer`; None if it is not complete yet."""
    body = framing.take_frame(buffer, FRAME_BYTES_MAX)
    return None if body is None else decode_json(body)


# -- requests


def encode_request(request: Request) -> bytes:
    message: dict[str, Any] = {name: getattr(request, name) for name in OPERATIONS[request.op]}
    if "value" in message:
        message["value"] = encode_bytes(request.value)
    return frame({"id": request.id, "op": request.op, **message})


def decode_request(message: dict[str, Any]) -> Request:
    op = message.get("op")
    if not isinstance(op, str) or op not in OPERATIONS:
        raise ProtocolError(f"no such operation: {str(op)[:80]!r}")
    if set(message) != {"id", "op", *OPERATIONS[op]}:
        raise ProtocolError(f"{op} has the fields {', '.join(OPERATIONS[op])}")
    fields: dict[str, Any] = {name: _DECODERS[name](message[name]) for name in OPERATIONS[op]}
    return Request(id=decode_integer(message["id"]), op=op, **fields)


# -- replies


def result_frame(request: int, result: Any) -> bytes:
    return frame({"id": request, "result": result})


def error_frame(request: int, error: LedgerError) -> bytes:
    kind = type(error).__name__
    assert kind in _ERRORS, kind
    return frame({"id": request, "error": kind, "message": error.message, "hint": error.hint})


def decode_error(message: dict[str, Any]) -> LedgerError | None:
    """The error that a reply carries, if it carries one."""
    if "error" not in message:
        return None
    kind = _ERRORS.get(str(message["error"]))
    if kind is None:
        raise ProtocolError(f"no such error: {str(message['error'])[:80]!r}")
    return kind(str(message.get("message", "")), hint=str(message.get("hint", "")))


def reading_frames(request: int, entries: Iterable[Entry], revision: int) -> Iterator[bytes]:
    """The reply to a `read`, encoded as it is sent, so that a large one never exists twice."""
    batch: list[Any] = []
    size = 0
    for entry in entries:
        if size >= _BATCH_BYTES:
            yield frame({"id": request, "entries": batch, "revision": revision, "more": True})
            batch, size = [], 0
        batch.append(encode_entry(entry))
        size += _size(entry.key, entry.value)
    yield frame({"id": request, "entries": batch, "revision": revision, "more": False})


def change_frames(changes: Iterable[Change], revision: int) -> Iterator[bytes]:
    """Changes for a watch. `revision` in a frame is where a watch that has seen it goes on from."""
    batch: list[Any] = []
    size = 0
    seen = 0
    for change in changes:
        if size >= _BATCH_BYTES:
            yield frame({"changes": batch, "revision": seen})
            batch, size = [], 0
        batch.append([change.kind, change.key, encode_bytes(change.value), change.revision])
        size += _size(change.key, change.value)
        seen = change.revision
    yield frame({"changes": batch, "revision": revision})


def decode_changes(message: dict[str, Any]) -> tuple[tuple[Change, ...], int]:
    changes = []
    for kind, key, value, revision in _rows(message.get("changes"), 4):
        if kind not in ("put", "delete"):
            raise ProtocolError(f"no such change: {str(kind)[:80]!r}")
        changes.append(Change(kind, decode_text(key), decode_bytes(value), decode_integer(revision)))
    return tuple(changes), decode_integer(message.get("revision"))


def decode_entries(rows: Any) -> tuple[Entry, ...]:
    return tuple(decode_entry(row) for row in _rows(rows, 5))


# -- fields, also used by the journal


def encode_entry(entry: Entry) -> list[Any]:
    return [entry.key, encode_bytes(entry.value), entry.revision, entry.created, entry.lease]


def decode_entry(row: Any) -> Entry:
    ((key, value, revision, created, lease),) = _rows([row], 5)
    return Entry(
        decode_text(key),
        decode_bytes(value),
        decode_integer(revision),
        decode_integer(created),
        decode_integer(lease),
    )


def encode_bytes(value: bytes) -> str:
    return base64.b64encode(value).decode("ascii")


def decode_bytes(value: Any) -> bytes:
    if not isinstance(value, str):
        raise ProtocolError("bytes travel as base64 text")
    try:
        return base64.b64decode(value, validate=True)
    except ValueError as error:
        raise ProtocolError(f"not base64: {value[:80]!r}") from error


def decode_text(value: Any) -> str:
    if not isinstance(value, str):
        raise ProtocolError(f"not text: {str(value)[:80]!r}")
    return value


def decode_integer(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= _INTEGER_MAX:
        raise ProtocolError(f"not a whole number from 0 on: {str(value)[:80]!r}")
    return value


def decode_while_at(value: Any) -> tuple[str, int] | None:
    if value is None:
        return None
    ((key, revision),) = _rows([value], 2)
    return decode_text(key), decode_integer(revision)


def decode_seconds(value: Any) -> float:
    if type(value) not in (int, float) or not abs(value) <= _INTEGER_MAX:  # NaN is not either
        raise ProtocolError(f"not a time: {str(value)[:80]!r}")
    return float(value)


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "key": decode_text,
    "prefix": decode_text,
    "value": decode_bytes,
    "lease": decode_integer,
    "expected": decode_integer,
    "while_at": decode_while_at,
    "revision": decode_integer,
    "ttl_s": decode_seconds,
}


def _rows(rows: Any, width: int) -> list[list[Any]]:
    if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) == width for row in rows):
        raise ProtocolError(f"not a list of rows of {width}: {str(rows)[:80]!r}")
    return rows


def _size(key: str, value: bytes) -> int:
    """At least what these take in JSON: base64 grows by a third, an escaped character to six bytes (or twelve)."""
    return 12 * len(key) + len(value) * 4 // 3 + 100
