"""The table of units as a replicated state: what its updates and queries look like on the wire.

    begin    where the run begins: the first unit, and those left before it
    used     a unit whose update is acknowledged
    ask      for a unit before `until`, at this clock, within a bound on staleness or none; the sequence of the update
             is that of the ask
    back     this worker will not use what it holds
    wish     for somebody's extras
    bring    extras, for those who wish for them

One update may have several of them, which are carried out in this order. Pure but for being changed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any

import xxhash

from holdfast.core.errors import ProtocolError
from holdfast.core.words import encode_json
from holdfast.servers.replicated import Answer, Author, Head, Payload
from holdfast.servers.units import Ask, Extras, Given, Row, UnitTable
from holdfast.servers.units_port import UnitsPosition

KIND = "units"
NAME = "units/0"
NUMBER_MAX = 1 << 62
LEFT_MAX = 1 << 16
EXTRAS_CHARACTERS_MAX = 2 << 20


def begin_head(unit: int, left: Collection[int]) -> dict[str, Any]:
    return {"begin": {"unit": unit, "left": sorted(left)}}


def used_head(unit: int) -> dict[str, Any]:
    return {"used": unit}


def ask_head(until: int, clock: int, seen: int, staleness: int | None = None) -> dict[str, Any]:
    bound = {"staleness": staleness} if staleness is not None else {}
    return {"ask": {"until": until, "clock": clock, "seen": seen, **bound}}


def back_head() -> dict[str, Any]:
    return {"back": True}


def wish_head() -> dict[str, Any]:
    return {"wish": True}


def bring_head(extras: Extras) -> dict[str, Any]:
    return {"bring": {"wish": extras.wish, "step": extras.step, "text": extras.text}}


def extras_query(wish: int) -> Head:
    return {"kind": "extras", "wish": wish}


def read_extras(head: Any) -> Extras:
    """ProtocolError for what no worker would send."""
    if not isinstance(head, dict) or not _are_numbers([head.get("wish"), head.get("step")]):
        raise ProtocolError("extras that are none")
    if not isinstance(head.get("text"), str) or len(head["text"]) > EXTRAS_CHARACTERS_MAX:
        raise ProtocolError("extras that are none, or too large")
    return Extras(head["wish"], head["step"], head["text"])


def answer_query(worker: str, sequence: int) -> Head:
    return {"kind": "answer", "worker": worker, "sequence": sequence}


def standing_query(clocks: Mapping[str, int] | None) -> Head:
    return {"kind": "standing", "clocks": dict(clocks) if clocks is not None else {}}


def read_given(head: Head) -> Given:
    unit, others = head.get("unit"), [head.get(name, 0) for name in ("wish", "ahead", "finished")]
    if (unit is not None and not _is_number(unit)) or not _are_numbers(others):
        raise ProtocolError("a unit that is no number")
    return Given(unit, *others)


def read_standing(head: Head) -> UnitsPosition | None:
    left = head.get("left")
    if left is None:
        return None
    if not _are_numbers(left) or not _is_number(head.get("next")):
        raise ProtocolError("a standing that is none")
    return UnitsPosition(bool(head.get("begun")), int(head["next"]), tuple(left))


class UnitsState:
    def __init__(self) -> None:
        self._table = UnitTable()
        self.version = 0  # updates applied

    def check(self, author: Author, payload: Payload) -> None:
        _read(payload.head)

    def apply(self, author: Author, payload: Payload) -> None:
        begin, used, ask = _read(payload.head)
        self.version += 1
        table, who = self._table, (author.worker, author.incarnation)
        if begin is not None:
            table.begin(*begin)
        if used is not None:
            table.used(*who, used)
        if ask is not None:
            table.ask(*who, _read_ask(author.sequence, ask))
        if payload.head.get("back") is True:
            table.give_back(*who)
        if payload.head.get("wish") is True:
            table.wish()
        if "bring" in payload.head:
            table.bring(read_extras(payload.head["bring"]))

    def forget(self, worker: str, incarnation: int) -> None:
        self._table.forget(worker, incarnation)

    def read(self, query: Head) -> Answer | None:
        table, kind = self._table, query.get("kind")
        if kind == "answer":
            worker, sequence = query.get("worker"), query.get("sequence")
            if not isinstance(worker, str) or not _is_number(sequence):
                raise ProtocolError("a question for a unit that names nobody")
            given = table.answer(worker, int(sequence))  # type: ignore[arg-type]
            return Answer(asdict(given)) if given is not None else None
        if kind == "extras":
            if not _is_number(query.get("wish")):
                raise ProtocolError("a wish that is no number")
            met = table.extras.wish >= query["wish"]
            return Answer(bring_head(table.extras)) if met else None
        if kind == "standing":
            clocks = query.get("clocks")
            if not isinstance(clocks, dict) or not all(_is_number(clock) for clock in clocks.values()):
                raise ProtocolError("clocks that are none")
            left = table.left_at(clocks)
            return Answer({"begun": table.begun, "next": table.next, "left": left, "wishes": table.wishes})
        raise ProtocolError(f"a query of units of the kind {kind!r:.40}")

    def waits_for(self, query: Head) -> str:
        """Why `read` has no answer yet."""
        if query.get("kind") == "answer":
            return self._table.waits_for(str(query.get("worker")))
        return "the extras of a worker that has been here longer"

    def capture(self) -> Answer:
        return Answer(self._captured())

    def _captured(self) -> dict[str, Any]:
        table = self._table
        rows = {
            worker: {
                "incarnation": row.incarnation,
                "held": sorted(row.held.items()),
                "used": [list(one) for one in row.used],
                "present": row.present,
                "ask": asdict(row.ask) if row.ask is not None else None,
                "answer": [row.answer[0], asdict(row.answer[1])] if row.answer is not None else None,
            }
            for worker, row in sorted(table.rows.items())
        }
        return {
            "version": self.version,
            "begun": table.begun,
            "next": table.next,
            "finished": table.finished,
            "returned": table.returned,
            "waiting": table.waiting,
            "rows": rows,
            "wishes": table.wishes,
            **bring_head(table.extras),
        }

    def restore(self, payload: Payload) -> None:
        head, table = payload.head, UnitTable()
        try:
            table.begun, table.next, table.returned = bool(head["begun"]), int(head["next"]), list(head["returned"])
            table.finished = int(head["finished"])
            for worker, row in head["rows"].items():
                table.rows[str(worker)] = Row(
                    int(row["incarnation"]),
                    bool(row["present"]),
                    {int(unit): int(clock) for unit, clock in row["held"]},
                    [(int(unit), int(clock)) for unit, clock in row["used"]],
                    _read_ask(row["ask"]["sequence"], row["ask"]) if row["ask"] is not None else None,
                    (int(row["answer"][0]), read_given(row["answer"][1])) if row["answer"] is not None else None,
                )
            version, table.wishes, table.extras = int(head["version"]), int(head["wishes"]), read_extras(head["bring"])
            table.waiting = [str(worker) for worker in head["waiting"]]
            if not all(table.rows[worker].ask is not None for worker in table.waiting):
                raise ValueError("somebody waits who has not asked")
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise ProtocolError("not a table of units") from error
        self._table, self.version = table, version

    def digest(self) -> str:
        return xxhash.xxh3_128(encode_json(self._captured())).hexdigest()


def _read(head: Head) -> tuple[tuple[int, list[int]] | None, int | None, Head | None]:
    """ProtocolError for what no worker would send."""
    if not head or not head.keys() <= {"begin", "used", "ask", "back", "wish", "bring"}:
        raise ProtocolError("an update of units that is none")
    begin, used, ask = head.get("begin"), head.get("used"), head.get("ask")
    if begin is not None:
        if not isinstance(begin, dict) or not _is_number(begin.get("unit")) or not _are_numbers(begin.get("left")):
            raise ProtocolError("a beginning of units that is none")
        begin = (begin["unit"], begin["left"])
    if used is not None and not _is_number(used):
        raise ProtocolError("a unit that is no number")
    if ask is not None:
        _read_ask(0, ask)
    if "bring" in head:
        read_extras(head["bring"])
    return begin, used, ask


def _read_ask(sequence: int, head: Any) -> Ask:
    fields = [head.get(name) for name in ("until", "clock", "seen")] if isinstance(head, dict) else [None]
    bound = head.get("staleness") if isinstance(head, dict) else None
    if not _are_numbers([sequence, *fields]) or (bound is not None and not _is_number(bound)):
        raise ProtocolError("a question for a unit that is none")
    return Ask(sequence, head["until"], head["clock"], head["seen"], bound)


def _is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value <= NUMBER_MAX


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= LEFT_MAX and all(_is_number(one) for one in value)
