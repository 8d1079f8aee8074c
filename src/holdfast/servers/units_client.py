"""A worker's way to the table of units on the servers: units_port.Units over the same requests as the parameters'.

An ask is answered when the table can; the request for the answer waits on the server, and `answer` looks whether it has
come. Used by one thread; what comes back is noted by the thread of the requests.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from holdfast.core.errors import PeerError
from holdfast.core.words import KEY_SLICE, encode_json
from holdfast.ledger.port import Ledger
from holdfast.servers.asking import Ask, Asking
from holdfast.servers.gathering import Wanted, gather
from holdfast.servers.log_codec import encode_configuration
from holdfast.servers.placing import first_placement
from holdfast.servers.replicated import Head
from holdfast.servers.units import Extras, Given
from holdfast.servers.units_port import UnitsPosition
from holdfast.servers.units_state import (
    NAME,
    answer_query,
    ask_head,
    back_head,
    begin_head,
    bring_head,
    extras_query,
    read_extras,
    read_given,
    read_standing,
    standing_query,
    used_head,
    wish_head,
)

ANSWER_S = 3600.0  # for a unit: as long as the others may take for the last ones
READ_WAIT_S = 1.0


def place_units(ledger: Ledger, wanted: Wanted) -> None:
    """Where no one has placed the table yet, place it. The servers of the run are registered."""
    if ledger.get(KEY_SLICE + NAME) is None:
        present = gather(ledger)
        [configuration] = first_placement(present.hosts, 1, min(wanted.replicas_of(present), len(present.hosts)))
        ledger.compare_and_set(KEY_SLICE + NAME, encode_json(encode_configuration(configuration)), expected=0)


class _Reply:
    """What came of a request."""

    def __init__(self) -> None:
        self._come = threading.Event()
        self._head: Head = {}
        self._error: Exception | None = None

    def done(self, ask: Ask, head: Head) -> None:
        self._head = head
        self._come.set()

    def failed(self, error: Exception) -> None:
        self._error = error
        self._come.set()

    @property
    def has_come(self) -> bool:
        return self._come.is_set()

    def wait(self, timeout_s: float) -> Head:
        if not self._come.wait(timeout_s):
            raise PeerError(f"no server has answered for {NAME} within {timeout_s:g} s")
        if self._error is not None:
            raise self._error
        return self._head


class RemoteUnits:
    """Owns `asking`. `worker` has no incarnation in it. `prepare` places the table, before the first request."""

    def __init__(
        self, asking: Asking, worker: str, incarnation: int, *, prepare: Callable[[], None], patience_s: float = 120.0
    ) -> None:
        self._asking = asking
        self._author = {"worker": worker, "incarnation": incarnation}
        self._prepare: Callable[[], None] | None = prepare
        self._patience_s = patience_s
        self._sequence = 0
        self._asked = 0  # the sequence of the last ask
        self._seen = 0
        self._reply: _Reply | None = None
        self._under_way: Ask | None = None
        self._wish: tuple[int, _Reply] | None = None

    def begin(self, unit: int, left: Collection[int]) -> None:
        self._push(begin_head(unit, left))

    def tell(self, *, used: int | None = None) -> None:
        if used is not None:
            self._push(used_head(used))

    def ask(self, until: int, clock: int, staleness: int | None = None) -> None:
        self._push(ask_head(until, clock, self._seen, staleness))
        self._asked, self._reply = self._sequence, _Reply()
        query = answer_query(str(self._author["worker"]), self._asked)
        self._under_way = self._submit(_read(query), self._reply, ANSWER_S)

    def answer(self) -> Given | None:
        if self._reply is None or not self._reply.has_come:
            return None
        given = read_given(self._reply.wait(0)["answer"])
        self._seen, self._under_way = self._asked, None
        return given

    def waits_for(self) -> str:
        ask = self._under_way
        return ask.why if ask is not None else ""

    def standing(self, clocks: Mapping[str, int] | None = None) -> UnitsPosition | None:
        reply = _Reply()
        self._submit(_read(standing_query(clocks)), reply, self._patience_s)
        return read_standing(reply.wait(self._patience_s)["answer"])

    def wish(self) -> int:
        self._push(wish_head())
        reply = _Reply()
        self._submit(_read(standing_query(None)), reply, self._patience_s)
        return int(reply.wait(self._patience_s)["answer"]["wishes"])

    def bring(self, extras: Extras) -> None:
        self._push(bring_head(extras))

    def extras(self, wish: int) -> Extras | None:
        if self._wish is None or self._wish[0] != wish:
            self._wish = (wish, _Reply())
            self._submit(_read(extras_query(wish)), self._wish[1], self._patience_s)
        return read_extras(self._wish[1].wait(0)["answer"]["bring"]) if self._wish[1].has_come else None

    def give_back(self) -> None:
        self._push(back_head())

    def forget(self, worker: str, incarnation: int) -> None:
        reply = _Reply()
        self._submit({"op": "retire", "worker": worker, "incarnation": incarnation}, reply, self._patience_s)
        reply.wait(self._patience_s)

    def close(self) -> None:
        self._asking.close()

    def _push(self, payload: dict[str, Any]) -> None:
        self._sequence += 1
        reply = _Reply()
        head = {"op": "push", "payload": payload, **self._author, "sequence": self._sequence}
        self._submit(head, reply, self._patience_s)
        reply.wait(self._patience_s)

    def _submit(self, head: dict[str, Any], reply: _Reply, patience_s: float) -> Ask:
        if self._prepare is not None:
            self._prepare()
            self._prepare = None
        ask = Ask(NAME, head, (), reply.done, reply.failed, deadline=time.monotonic() + patience_s)
        self._asking.submit([ask])
        return ask


def _read(query: Head) -> dict[str, Any]:
    return {"op": "read", "fresh": True, "query": query, "wait_s": READ_WAIT_S}
