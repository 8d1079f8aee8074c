"""Reads that go to one certain server, whoever the ledger says leads: what a worker asks that has heard of nothing.

`read_directly` asks once and waits. `StubbornReaders` ask every server all the time, also while it is stopped or cut
off: what was asked then is answered when it wakes. An answer that is said to be fresh goes into the accounts, and has
to fit the history as every read does; a refusal is what a server says that knows better.
"""

from __future__ import annotations

import selectors
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from typing import Any

import torch

from holdfast.core.errors import HoldfastError, PeerError
from holdfast.core.words import KEY_SERVERS, Registration
from holdfast.net.streams import Deadline
from holdfast.servers.connections import SLICES
from holdfast.servers.frames import FrameStream, Head, Outgoing, ask, encode_frame
from holdfast.servers.links import dialler
from tests.harness.servers.fleet import Fleet

UNDER_WAY_MAX = 64  # of one reader's questions
DIAL_AGAIN_S = 0.2

Seen = Callable[[str, int, float, float, torch.Tensor], None]  # server, slice, called at, returned at, the values


def _question(number: int, slice_number: int, *, fresh: bool) -> Head:
    query = {"kind": "pull", "clock_floor": 0}
    name = f"parameters/{slice_number}"
    return {"op": "read", "slice": name, "id": number, "fresh": fresh, "query": query, "wait_s": 0.0}


def _registration(fleet: Fleet, server: str) -> Registration:
    entry = fleet.ledger.get(KEY_SERVERS + server)
    if entry is None:
        raise PeerError(f"{server} is not registered")
    return Registration.decode(entry.value)


def _values(body: memoryview) -> torch.Tensor:
    return torch.frombuffer(bytearray(body), dtype=torch.float32)


def read_directly(
    fleet: Fleet, server: str, slice_number: int, *, fresh: bool, timeout_s: float = 20.0
) -> tuple[Head, torch.Tensor]:
    """The answer's head and, if it is not refused, the values."""
    dial = dialler(_registration(fleet, server), "elsewhere", fleet.keys, (SLICES, "direct"))
    with closing(dial()) as sock:
        head, body = ask(sock, _question(1, slice_number, fresh=fresh), Deadline(timeout_s, timeout_s))
        return head, _values(body) if body.nbytes else torch.empty(0)


class StubbornReaders:
    """A thread for each server that ever runs. `seen` is called in these threads."""

    def __init__(self, fleet: Fleet, *, slices: int, pace_s: float, seen: Seen) -> None:
        self._fleet = fleet
        self._slices = slices
        self._pace_s = pace_s
        self._seen = seen
        self._stopping = threading.Event()
        self._threads: dict[str, threading.Thread] = {}
        self.fresh = 0
        self.refused = 0

    def attend(self) -> None:
        """Begin to ask servers that are new."""
        for server in self._fleet.processes:
            if server not in self._threads:
                thread = threading.Thread(target=self._ask_one, args=(server,), name=f"stubborn-{server}", daemon=True)
                self._threads[server] = thread
                thread.start()

    def close(self) -> None:
        self._stopping.set()
        for thread in self._threads.values():
            thread.join(timeout=30.0)

    def _ask_one(self, server: str) -> None:
        while not self._stopping.is_set() and server in self._fleet.processes:
            with suppress(HoldfastError, OSError, ValueError):
                dial = dialler(_registration(self._fleet, server), "elsewhere", self._fleet.keys, (SLICES, "stubborn"))
                with closing(_Questions(dial(), lambda *what: self._take(server, *what))) as questions:
                    while not self._stopping.is_set():
                        for number in range(self._slices):
                            questions.put(number)
                        questions.listen(self._pace_s)
            self._stopping.wait(DIAL_AGAIN_S)

    def _take(self, server: str, slice_number: int, called_at: float, values: torch.Tensor | None) -> None:
        if values is None:
            self.refused += 1
        else:
            self.fresh += 1
            self._seen(server, slice_number, called_at, time.monotonic(), values)


class _Questions:
    """One connection with questions on it. `answered` is given None for what is refused."""

    def __init__(self, sock: Any, answered: Callable[[int, float, torch.Tensor | None], None]) -> None:
        self._answered = answered
        self._stream = FrameStream(sock, self._place)
        self._asked: dict[int, tuple[int, float]] = {}  # the slice, and when
        self._last = 0
        self._body = memoryview(b"")
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)

    def put(self, slice_number: int) -> None:
        if len(self._asked) >= UNDER_WAY_MAX:
            return
        self._last += 1
        self._asked[self._last] = (slice_number, time.monotonic())
        self._stream.send(Outgoing(encode_frame(_question(self._last, slice_number, fresh=True), ())))
        self._stream.flush()

    def listen(self, for_s: float) -> None:
        until = time.monotonic() + for_s
        while (left_s := until - time.monotonic()) > 0:
            if self._selector.select(left_s):
                self._stream.receive(self._take)

    def _place(self, head: Head, nbytes: int) -> list[memoryview]:
        self._body = memoryview(bytearray(nbytes))
        return [self._body]

    def _take(self, head: Head, nbytes: int) -> None:
        slice_number, called_at = self._asked.pop(head["id"])
        assert "refused" in head or head["fresh"] is True, f"a fresh read was asked for, and {head} came"
        self._answered(slice_number, called_at, None if "refused" in head else _values(self._body))

    def close(self) -> None:
        self._selector.close()
        self._stream.close()
