"""How a slice is captured at a place in its log that fits the other slices': part of a replica, on the primary.

An update must be in the captured state of all slices or of none. So whoever captures asks every slice to hold, and
learns the newest update of each worker that each of them has taken. The greatest of these is the limit: each slice
takes what is still missing up to the limit, and nothing beyond. When everything up to the limit is committed the state
is captured, and the updates that were held go on. A hold ends by itself after a while, and so does what was captured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from holdfast.log.deduplication import Deduplication
from holdfast.log.machine import ReplicaMachine
from holdfast.servers.frames import Outgoing
from holdfast.servers.replicated import Answer, Author, ReplicatedState

CAPTURED_S = 300.0  # for so long a captured state may be read
CAPTURED_MAX = 2

Limits: TypeAlias = Mapping[tuple[str, int], int]  # worker and incarnation -> the newest sequence


@dataclass
class Hold:
    token: str
    until: float
    limits: Limits | None = None  # None: nothing new is taken
    client: str = ""  # who waits for the capture
    held: list[tuple[Author, Callable[[], None]]] = field(default_factory=list)

    def takes(self, author: Author) -> bool:
        return self.limits is not None and author.sequence <= self.limits.get((author.worker, author.incarnation), 0)

    def let_through(self) -> None:
        """Those of the updates that were held that are within the limits."""
        held, self.held = self.held, []
        for author, go_on in held:
            if self.takes(author):
                go_on()
            else:
                self.held.append((author, go_on))

    def is_reached(self, table: Deduplication) -> bool:
        return self.limits is not None and all(
            table.has_all(worker, incarnation, sequence) for (worker, incarnation), sequence in self.limits.items()
        )


class Answering(Protocol):
    def answer(self, client: str, head: dict[str, Any], answer: Answer | None = None) -> Outgoing | None: ...


class Capturing:
    """The hold of one slice, and what was captured of it. Live state is copied only when it is about to change."""

    def __init__(
        self,
        machine: ReplicaMachine,
        state: ReplicatedState,
        answering: Answering,
        answer_live: Callable[[str, dict[str, Any], Answer], None],
    ) -> None:
        self._machine = machine
        self._state = state
        self._answering = answering
        self._answer_live = answer_live
        self._hold: Hold | None = None
        self._kept: dict[str, tuple[Answer, float]] = {}  # by the token, until when
        self._live: set[str] = set()

    @property
    def holds(self) -> bool:
        return self._hold is not None

    def holds_back(self, author: Author, go_on: Callable[[], None]) -> bool:
        """Whether this update has to wait; `go_on` is called when it has waited."""
        hold, leading = self._hold, self._machine.leading
        if hold is None or leading is None or not leading.is_established or hold.takes(author):
            return False
        hold.held.append((author, go_on))
        return True

    def hold(self, client: str, token: str, until: float) -> None:
        """Take no new update, and say which are taken."""
        leading = self._machine.leading
        if leading is None or not leading.is_established:
            self._fail(client, f"{self._machine.me} is not the primary")
        elif self._hold is not None:
            self._fail(client, "it is being captured already")
        else:
            self._hold = Hold(token, until)
            newest = [[worker, number, last] for (worker, number), last in leading.newest_sequences().items()]
            self._answering.answer(client, {"newest": newest})

    def capture_at(self, client: str, token: str, limits: Limits, now: float) -> None:
        """Capture the state when everything up to these limits is in it."""
        hold = self._hold
        if hold is None or hold.token != token:
            self._fail(client, "it took too long to capture all slices")
            return
        hold.limits, hold.client = limits, client
        hold.let_through()
        self.capture_if_reached(now)

    def capture_if_reached(self, now: float) -> None:
        hold = self._hold
        if hold is None or not hold.is_reached(self._machine.copy.table):
            return
        state = self._state.capture()
        while len(self._kept) >= CAPTURED_MAX:
            self._drop(next(iter(self._kept)))
        self._kept[hold.token] = (state, now + CAPTURED_S)
        self._live.add(hold.token)
        self._answering.answer(hold.client, {"version": self._state.version, "state": state.head})
        self._end_hold()

    def captured(self, client: str, token: str, *, drop: bool) -> None:
        if drop:
            self._drop(token)
            if self._hold is not None and self._hold.token == token:
                self._end_hold()
            self._answering.answer(client, {"version": 0})
        elif token in self._kept:
            self._answer_live(client, {"version": 0}, self._kept[token][0])
        else:
            self._fail(client, "what was captured is not here any more")

    def tick(self, now: float) -> None:
        hold = self._hold
        if hold is not None and (now > hold.until or self._machine.leading is None):
            if hold.client:
                self._fail(hold.client, "it took too long to capture all slices")
            self._end_hold()
        for token in [one for one, (_, until) in self._kept.items() if now > until]:
            self._drop(token)

    def detach(self) -> None:
        """The state is going to change."""
        for token in self._live:
            state, until = self._kept[token]
            copied = Answer(state.head, [memoryview(bytes(view)) for view in state.views])
            self._kept[token] = (copied, until)
        self._live.clear()

    def _fail(self, client: str, reason: str) -> None:
        self._answering.answer(client, {"refused": reason, "kind": "failed"})

    def _drop(self, token: str) -> None:
        self._kept.pop(token, None)
        self._live.discard(token)

    def _end_hold(self) -> None:
        hold, self._hold = self._hold, None
        if hold is not None:
            for _, go_on in hold.held:
                go_on()
