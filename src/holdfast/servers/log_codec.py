"""The messages between replicas as heads of frames, and back. Pure.

The payloads of an `Append` travel behind the head, one after the other. In the head stands, for each update, how long
its payload is, and the payload's own head. What comes from elsewhere is checked field by field.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from holdfast.core.errors import ProtocolError
from holdfast.log import messages as m
from holdfast.log.configuration import Configuration, LogEnd

NUMBER_MAX = 1 << 62
NAME_CHARACTERS_MAX = 200
LIST_MAX = 1 << 20


def encode_configuration(configuration: Configuration) -> dict[str, Any]:
    return {
        "epoch": configuration.epoch,
        "primary": configuration.primary,
        "replicas": list(configuration.replicas),
        "reason": configuration.reason,
    }


def decode_configuration(fields: Any) -> Configuration:
    fields = _fields(fields)
    replicas = tuple(_name(one) for one in _list(fields.get("replicas")))
    epoch, primary = _number(fields.get("epoch")), _name(fields.get("primary"))
    if epoch < 1 or primary not in replicas or len(set(replicas)) != len(replicas):
        raise ProtocolError(f"not a configuration: {str(fields)[:80]}")
    return Configuration(epoch, primary, replicas, str(fields.get("reason", ""))[:1000])


def encode_snapshot(snapshot: m.Snapshot) -> dict[str, Any]:
    rows = [
        [one.worker, one.incarnation, one.gone, one.contiguous, [list(pair) for pair in one.indices]]
        for one in snapshot.remembered
    ]
    return {"end": _end(snapshot.end), "remembered": rows}


def decode_snapshot(fields: Any) -> m.Snapshot:
    fields = _fields(fields)
    rows = []
    for row in _list(fields.get("remembered")):
        if not isinstance(row, list) or len(row) != 5 or type(row[2]) is not bool:
            raise ProtocolError("a snapshot with what is no row of its table")
        pairs = []
        for pair in _list(row[4]):
            if not isinstance(pair, list) or len(pair) != 2:
                raise ProtocolError("a snapshot with what is no row of its table")
            pairs.append((_number(pair[0]), _number(pair[1])))
        rows.append(m.Remembered(_name(row[0]), _number(row[1]), row[2], _number(row[3]), tuple(pairs)))
    return m.Snapshot(_read_end(fields.get("end")), tuple(rows))


def encode_entry(entry: m.Entry, head_of: Callable[[m.Update], Any]) -> list[Any]:
    content = entry.content
    if isinstance(content, m.Update):
        update = ["update", content.worker, content.incarnation, content.sequence, content.nbytes, head_of(content)]
        return [entry.epoch, entry.index, *update]
    if isinstance(content, m.Opened):
        return [entry.epoch, entry.index, "opened", content.primary]
    return [entry.epoch, entry.index, "forgotten", content.worker, content.incarnation]


def decode_entry(row: Any, keep: Callable[[Any, int], m.Payload]) -> m.Entry:
    """`keep` is given the head of a payload and its length, in the order of the entries."""
    if not isinstance(row, list) or len(row) < 4:
        raise ProtocolError("what is no entry of a log")
    epoch, index = _number(row[0]), _number(row[1])
    content: m.Update | m.Opened | m.Forgotten
    if row[2] == "update" and len(row) == 8:
        worker, incarnation, sequence, nbytes = _name(row[3]), _number(row[4]), _number(row[5]), _number(row[6])
        content = m.Update(worker, incarnation, sequence, keep(_fields(row[7]), nbytes), nbytes)
    elif row[2] == "opened" and len(row) == 4:
        content = m.Opened(_name(row[3]))
    elif row[2] == "forgotten" and len(row) == 5:
        content = m.Forgotten(_name(row[3]), _number(row[4]))
    else:
        raise ProtocolError("what is no entry of a log")
    return m.Entry(epoch, index, content)


def encode_message(message: m.Message, head_of: Callable[[m.Update], Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {"is": type(message).__name__.lower()}
    for name in message.__slots__:
        value = getattr(message, name)
        if isinstance(value, LogEnd):
            value = _end(value)
        elif isinstance(value, Configuration):
            value = encode_configuration(value)
        elif isinstance(value, m.Snapshot):
            value = encode_snapshot(value)
        elif name == "entries":
            value = [encode_entry(entry, head_of) for entry in value]
        fields[name] = value
    return fields


def decode_message(fields: Any, keep: Callable[[Any, int], m.Payload]) -> m.Message:
    """ProtocolError for what no replica would say."""
    fields = _fields(fields)
    decode = _DECODERS.get(str(fields.get("is")))
    if decode is None:
        raise ProtocolError(f"a message of the kind {str(fields.get('is'))[:20]!r}")
    return decode(fields, keep)


def _append(fields: dict[str, Any], keep: Callable[[Any, int], m.Payload]) -> m.Append:
    entries = tuple(decode_entry(row, keep) for row in _list(fields.get("entries")))
    previous = _read_end(fields.get("previous"))
    expected = range(previous.index + 1, previous.index + 1 + len(entries))
    epochs = [previous.epoch, *(entry.epoch for entry in entries), _number(fields.get("epoch"))]
    if [entry.index for entry in entries] != list(expected) or epochs != sorted(epochs):
        raise ProtocolError("entries that do not follow on each other")
    start, sent_at = _number(fields.get("start")), _time(fields.get("sent_at"))
    return m.Append(epochs[-1], start, sent_at, previous, entries, _number(fields.get("committed")))


_DECODERS: dict[str, Callable[[dict[str, Any], Callable[[Any, int], m.Payload]], m.Message]] = {
    "append": _append,
    "appended": lambda f, _: m.Appended(_number(f.get("epoch")), _time(f.get("sent_at")), _number(f.get("matched"))),
    "mismatch": lambda f, _: m.Mismatch(_number(f.get("epoch")), _time(f.get("sent_at")), _number(f.get("try_after"))),
    "offer": lambda f, _: m.Offer(
        _number(f.get("epoch")), _number(f.get("start")), _time(f.get("sent_at")), decode_snapshot(f.get("snapshot"))
    ),
    "seal": lambda f, _: m.Seal(_number(f.get("epoch")), f.get("released") is True),
    "sealed": lambda f, _: m.Sealed(_number(f.get("epoch")), _read_end(f.get("end"))),
    "fenced": lambda f, _: m.Fenced(_number(f.get("epoch"))),
    "resigned": lambda f, _: m.Resigned(_number(f.get("epoch")), str(f.get("reason", ""))[:1000]),
    "configured": lambda f, _: m.Configured(decode_configuration(f.get("configuration")), _number(f.get("revision"))),
}


def _end(end: LogEnd) -> list[int]:
    return [end.epoch, end.index]


def _read_end(value: Any) -> LogEnd:
    if not isinstance(value, list) or len(value) != 2:
        raise ProtocolError("what is no end of a log")
    return LogEnd(_number(value[0]), _number(value[1]))


def _fields(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ProtocolError(f"not fields: {str(value)[:40]!r}")
    return value


def _list(value: Any) -> Sequence[Any]:
    if not isinstance(value, list) or len(value) > LIST_MAX:
        raise ProtocolError(f"not a list: {str(value)[:40]!r}")
    return value


def _number(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= NUMBER_MAX:
        raise ProtocolError(f"not a number: {str(value)[:40]!r}")
    return value


def _time(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ProtocolError(f"not a time: {str(value)[:40]!r}")
    return float(value)


def _name(value: Any) -> str:
    if not isinstance(value, str) or not 0 < len(value) <= NAME_CHARACTERS_MAX:
        raise ProtocolError(f"not a name: {str(value)[:40]!r}")
    return value
