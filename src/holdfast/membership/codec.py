"""Messages between members as bytes, and back. What comes from a wire is checked field by field, never trusted.

The body of a frame is a JSON object. A Ready carries a note: what the reduction must
know of this member (where its sums lie, its metrics), which the machine does not look at.
"""

from __future__ import annotations

import base64
import json
from typing import Any

from holdfast.core.errors import ProtocolError
from holdfast.membership.auditing import Said
from holdfast.membership.messages import (
    MARKS,
    Done,
    Fetched,
    GivenMean,
    Message,
    Over,
    Ready,
    ScriptPlace,
    Shared,
    Stored,
)
from holdfast.membership.suspecting import Details, StateEntry
from holdfast.membership.view_rules import Report
from holdfast.net.framing import frame

STEP_MAX = 1 << 40
SHARDS_MAX = 1 << 16
NAMES_MAX = 1 << 12
PACE_MAX = 1e9
DIGEST_MAX = 256
CALLS_MAX = 1 << 20
ENTRIES_MAX = 1 << 15
TEXT_MAX = 512
REASON_MAX = 1000
VALUE_MAX = 1 << 17  # of base64

_dumps = json.JSONEncoder(separators=(",", ":")).encode


def encode(message: Message | Shared | Stored, note: Any = None) -> bytes:
    """A whole frame."""
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
        if message.said.calls:
            fields["o"] = message.said.calls
        if message.said.late:
            fields["b"] = message.said.late
        if message.said.leader is not None:
            fields["i"] = message.said.leader
        if message.said.distrusts is not None:
            worker, why = message.said.distrusts
            fields["u"] = [worker, why[:TEXT_MAX]]
        if (details := message.said.details) is not None:
            listed = [[entry.name, entry.part, entry.kind, entry.value] for entry in details.entries]
            fields["e"] = [listed, details.came, details.whole]
        if message.over:
            fields["q"] = message.over[:REASON_MAX]
    elif isinstance(message, GivenMean):
        fields = {"t": "result", "s": message.step, "n": note}
    elif isinstance(message, Fetched):
        fields = {"t": "fetched", "s": message.step}
    elif isinstance(message, Over):
        fields = {"t": "over", "s": message.step, "q": message.reason[:REASON_MAX]}
    elif isinstance(message, Shared):
        fields = {"t": "shared", "s": message.place[0], "at": message.place[1:], "i": message.items}
    elif isinstance(message, Stored):
        fields = {"t": "stored", "k": message.key, "b": base64.b64encode(message.value).decode()}
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
        if message.doubt:
            fields["y"] = True
        if message.over:
            fields["q"] = message.over[:REASON_MAX]
        if message.given >= 0:
            fields["g"] = message.given
    return frame(_dumps(fields).encode())


def decode(body: bytes | bytearray) -> tuple[Message | Shared | Stored, Any]:
    """The message of a frame's body, and its note. ProtocolError for anything that no member would send."""
    try:
        fields = json.loads(body)
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
        rest = {"said": _said(fields), "mark": _mark(fields), "over": _reason(fields)}
        ready = Ready(_step(fields), _shards(fields), *flags, **rest)  # type: ignore[arg-type]
        return ready, fields.get("n")
    if kind == "result":
        return GivenMean(_step(fields)), fields.get("n")
    if kind == "fetched":
        return Fetched(_step(fields)), None
    if kind == "over":
        return Over(_step(fields), _reason(fields)), None
    if kind == "report":
        position = None if fields.get("s") is None else _step(fields)
        former = _names(fields.get("f", []))
        kept, searched, doubt = bool(fields.get("k")), bool(fields.get("o")), bool(fields.get("y"))
        known = str(fields.get("d", "")), former, searched, _pace(fields), _size(fields), doubt, _reason(fields)
        given = _step(fields, "g") if "g" in fields else -1
        return Report(position, _shards(fields), kept, *known, given), None
    if kind == "shared":
        return Shared(_place(fields), _items(fields)), None
    if kind == "stored":
        return _stored(fields), None
    raise ProtocolError(f"a peer sent a message of unknown kind {str(kind)[:40]!r}")


def _place(fields: dict[str, Any]) -> ScriptPlace:
    rest = fields.get("at")
    if not isinstance(rest, list) or len(rest) != 3 or any(type(one) is not int for one in rest):
        raise ProtocolError(f"a peer sent {str(rest)[:40]!r} for a place in its script")
    return (_step(fields), *rest)


def _items(fields: dict[str, Any]) -> tuple[tuple[str, object], ...]:
    items = fields.get("i")
    if not isinstance(items, list) or any(
        not isinstance(item, list) or len(item) != 2 or not isinstance(item[0], str) for item in items
    ):
        raise ProtocolError("a peer shared something else than a list of names and values")
    return tuple((name, value) for name, value in items)


def _stored(fields: dict[str, Any]) -> Stored:
    key, value = fields.get("k"), fields.get("b")
    if type(key) is not str or len(key) > TEXT_MAX or type(value) is not str or len(value) > VALUE_MAX:
        raise ProtocolError(f"a peer set {str(key)[:40]!r} to something that is no value of a store")
    try:
        return Stored(key, base64.b64decode(value, validate=True))
    except ValueError as error:
        raise ProtocolError(f"a peer set {key[:40]!r} to something that is not base64") from error


def _reason(fields: dict[str, Any]) -> str:
    """Why a script wants no further steps."""
    return str(fields.get("q", ""))[:REASON_MAX]


def _step(fields: dict[str, Any], key: str = "s") -> int:
    step = fields.get(key)
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
    calls, details = _calls(fields), _details(fields)
    said = fields.get("a", [[], ""])
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
    late = fields.get("b", 0)
    if type(late) is not int or not 0 <= late < MARKS:
        raise ProtocolError(f"a peer sent {str(late)[:40]!r} for its gradients")
    return Said(found, state, calls, details, late, _leader(fields), _distrusts(fields))


def _distrusts(fields: dict[str, Any]) -> tuple[str, str] | None:
    if "u" not in fields:
        return None
    try:
        worker, why = fields["u"]
        if any(type(text) is not str or len(text) > TEXT_MAX for text in (worker, why)):
            raise ValueError
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"a peer sent {str(fields['u'])[:40]!r} for whom it distrusts") from error
    return worker, why


def _leader(fields: dict[str, Any]) -> tuple[str, int] | None:
    if "i" not in fields:
        return None
    try:
        worker, step = fields["i"]
        if type(worker) is not str or len(worker) > TEXT_MAX or type(step) is not int or not 0 <= step < STEP_MAX:
            raise ValueError
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"a peer sent {str(fields['i'])[:40]!r} for a leader that was wrong") from error
    return worker, step


def _calls(fields: dict[str, Any]) -> tuple[int, ...]:
    calls = fields.get("o", [])
    if not isinstance(calls, list) or len(calls) > NAMES_MAX:
        raise ProtocolError(f"a peer sent {str(calls)[:40]!r} for its calls of optimizer.step()")
    if any(type(count) is not int or not 0 <= count < CALLS_MAX for count in calls):
        raise ProtocolError(f"a peer sent {str(calls)[:40]!r} for its calls of optimizer.step()")
    return tuple(calls)


def _details(fields: dict[str, Any]) -> Details | None:
    if "e" not in fields:
        return None
    try:
        listed, came, whole = fields["e"]
        if type(came) is not int or not 0 <= came < STEP_MAX or type(whole) is not bool or len(listed) > ENTRIES_MAX:
            raise ValueError
        entries = []
        for name, part, kind, value in listed:
            if any(type(text) is not str or len(text) > TEXT_MAX for text in (name, part, kind, value)):
                raise ValueError
            entries.append(StateEntry(name, part, kind, value))
    except (TypeError, ValueError) as error:
        raise ProtocolError("a peer's list of its state makes no sense") from error
    return Details(tuple(entries), came, whole)


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
