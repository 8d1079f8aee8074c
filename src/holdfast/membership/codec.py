"""Messages between members as bytes, and back. What comes from a wire is checked field by field, never trusted.

A frame is a length (4 bytes, little endian) and a JSON object. A Ready carries a note: what the reduction must
know of this member (where its sums lie, its metrics), which the machine does not look at.
"""

from __future__ import annotations

import json
import struct
from typing import Any

from holdfast.core.errors import ProtocolError
from holdfast.membership.auditing import NOTHING, Said
from holdfast.membership.messages import MARKS, Done, Message, Ready, Result
from holdfast.membership.view_rules import Report

FRAME_BYTES_MAX = 8 * 1024 * 1024
LENGTH = struct.Struct("<I")
STEP_MAX = 1 << 40
SHARDS_MAX = 1 << 16
NAMES_MAX = 1 << 12
PACE_MAX = 1e9
DIGEST_MAX = 256

_dumps = json.JSONEncoder(separators=(",", ":")).encode


def encode(message: Message, note: Any = None) -> bytes:
    if isinstance(message, Done):
        fields: dict[str, Any] = {"t": "done", "s": message.step}
    elif isinstance(message, Ready):
        fields = {"t": "ready", "s": message.step, "v": message.shards, "n": note}
        if message.change or message.leaving or message.stop:
            fields |= {"c": message.change, "l": message.leaving, "x": message.stop}
        if message.save or message.saving:
            fields["w"] = message.save + 2 * message.saving
        if message.mark:
            fields["m"] = message.mark
        if message.pace:
            fields["p"] = message.pace
        if message.said.shards or message.said.state:
            fields["a"] = [message.said.shards, message.said.state]
    elif isinstance(message, Result):
        fields = {"t": "result", "s": message.step, "n": note}
    else:
        fields = {"t": "report", "s": message.next, "v": message.held, "k": message.kept, "d": message.digest}
        if message.former:
            fields["f"] = message.former
        if message.searched:
            fields["o"] = True
        if message.pace:
            fields["p"] = message.pace
        if message.size:
            fields["z"] = message.size
    body = _dumps(fields).encode()
    return LENGTH.pack(len(body)) + body


def decode(body: bytes | bytearray | memoryview) -> tuple[Message, Any]:
    """The message of a frame's body, and its note. ProtocolError for anything that no member would send."""
    try:
        fields = json.loads(bytes(body))
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a peer sent something that is not JSON: {bytes(body[:40])!r}") from error
    if not isinstance(fields, dict):
        raise ProtocolError("a peer sent JSON that is not an object")
    kind = fields.get("t")
    if kind == "done":
        return Done(_step(fields)), None
    if kind == "ready":
        flags = bool(fields.get("c", False)), bool(fields.get("l", False)), str(fields.get("x", ""))
        saving = fields.get("w", 0)
        if type(saving) is not int or not 0 <= saving <= 3:
            raise ProtocolError(f"a peer sent {str(saving)[:40]!r} for whether it saves")
        flags = *flags, bool(saving & 1), bool(saving & 2), _pace(fields)  # type: ignore[assignment]
        return Ready(_step(fields), _shards(fields), *flags, said=_said(fields), mark=_mark(fields)), fields.get("n")
    if kind == "result":
        return Result(_step(fields)), fields.get("n")
    if kind == "report":
        position = None if fields.get("s") is None else _step(fields)
        former = _names(fields.get("f", []))
        kept, searched = bool(fields.get("k")), bool(fields.get("o"))
        digest = str(fields.get("d", ""))
        return Report(position, _shards(fields), kept, digest, former, searched, _pace(fields), _size(fields)), None
    raise ProtocolError(f"a peer sent a message of unknown kind {str(kind)[:40]!r}")


def _step(fields: dict[str, Any]) -> int:
    step = fields.get("s")
    if type(step) is not int or not 0 <= step < STEP_MAX:
        raise ProtocolError(f"a peer sent the step {str(step)[:40]!r}")
    return step


def _pace(fields: dict[str, Any]) -> float:
    pace = fields.get("p", 0.0)
    if type(pace) not in (int, float) or not 0 <= pace < PACE_MAX:
        raise ProtocolError(f"a peer sent {str(pace)[:40]!r} for its pace")
    return float(pace)


def _mark(fields: dict[str, Any]) -> int:
    mark = fields.get("m", 0)
    if type(mark) is not int or not 0 <= mark < MARKS:
        raise ProtocolError(f"a peer sent {str(mark)[:40]!r} for a save's mark")
    return mark


def _size(fields: dict[str, Any]) -> int:
    size = fields.get("z", 0)
    if type(size) is not int or not 0 <= size < SHARDS_MAX:
        raise ProtocolError(f"a peer sent {str(size)[:40]!r} for the run's size")
    return size


def _said(fields: dict[str, Any]) -> Said:
    said = fields.get("a")
    if said is None:
        return NOTHING
    try:
        shards, state = said
        found = tuple((shard, digest) for shard, digest in shards)
        if len(found) > SHARDS_MAX or any(type(shard) is not int or not 0 <= shard < SHARDS_MAX for shard, _ in found):
            raise ValueError
        digests = (state, *(digest for _, digest in found))
        if any(type(digest) is not str or len(digest) > DIGEST_MAX for digest in digests):
            raise ValueError
    except (TypeError, ValueError) as error:
        raise ProtocolError("a peer's digests make no sense") from error
    return Said(found, state)


def _names(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > NAMES_MAX or not all(isinstance(name, str) for name in value):
        raise ProtocolError(f"a peer sent {str(value)[:40]!r} for a list of workers")
    return tuple(value)


def _shards(fields: dict[str, Any]) -> tuple[int, ...]:
    shards = fields.get("v")
    if not isinstance(shards, list) or len(shards) > SHARDS_MAX:
        raise ProtocolError("a peer sent something else than a list of shards")
    for shard in shards:
        if type(shard) is not int or not 0 <= shard < SHARDS_MAX:
            raise ProtocolError(f"a peer sent the shard {str(shard)[:40]!r}")
    return tuple(shards)
