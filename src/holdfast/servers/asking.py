"""A worker's requests to slices: who is asked, and asked again, until there is an answer. One thread owns it all.

A request goes to the slice's primary, which the ledger names. When the connection breaks, when another server has
become the primary, or when the one that was asked sends it elsewhere, it is sent again as it is: servers know an update
by its worker, incarnation and sequence, so nothing is applied twice.

Answers go straight into the memory that the request names. An answer that is not waited for any more is thrown away:
it is known by its id, and a request that is sent again has another one.
"""

from __future__ import annotations

import mmap
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from holdfast.core.errors import DivergedError, Evicted, PeerError, ProtocolError
from holdfast.ledger.port import Ledger
from holdfast.net.mailbox import Mailbox
from holdfast.servers.connections import SLICES
from holdfast.servers.frames import FrameStream, Head, Outgoing, encode_frame
from holdfast.servers.ledger_line import LedgerFollower, LedgerValue, LedgerWhole
from holdfast.servers.links import Dialled, dialler
from holdfast.servers.run_facts import RunFacts
from holdfast.servers.worker_memory import SHARED_BYTES_MIN, Parts, WorkerMemory
from holdfast.trust.keys import Keys

AGAIN_S = 0.02  # after a server has said that it cannot answer now
SILENT_S = 5.0  # a server that says nothing for so long is asked again
PATIENCE_S = 120.0  # in all
TICK_S = 0.02


@dataclass(eq=False)
class Ask:
    """One request to one slice. `into` is where the answer's body goes; None: into memory of its own (`body`).

    `done` and `failed` are called once, one of them, in the thread that asks.
    """

    slice: str
    head: Head
    views: Sequence[memoryview]
    done: Callable[[Ask, Head], None]
    failed: Callable[[Exception], None]
    into: Sequence[memoryview] | None = None
    anywhere: bool = False  # any replica may answer
    body: memoryview = field(default_factory=lambda: memoryview(b""))
    deadline: float = 0.0
    server: str = ""  # that was asked last
    asked_at: float = 0.0
    again_at: float = 0.0
    hint: str = ""
    attempts: int = 0
    part: tuple[int, int] | None = None  # of the memory that is shared with the server: where, and how long

    @property
    def shared_bytes(self) -> int:
        """How much could pass through shared memory."""
        return sum(view.nbytes for view in self.views or self.into or ())


class Wire:
    """The connection to a server, and the requests that it has not answered."""

    def __init__(self, server: str, memory: WorkerMemory | None) -> None:
        self.server = server
        self.memory = memory
        self._parts = Parts(memory.slot_bytes) if memory is not None else None
        self.stream: FrameStream | None = None
        self.asks: dict[int, Ask] = {}
        self.filling = 0  # the id of the answer whose body is being read
        self.filled = False  # the answer has a body of its own
        self._moved = (0, 0.0)  # bytes, and since when there were no more

    def through_memory(self, ask: Ask) -> tuple[Head, Sequence[memoryview]]:
        """What has to be said of the memory, and what has to be sent."""
        ask.part = None
        if self.memory is None or self._parts is None or ask.shared_bytes < SHARED_BYTES_MIN:
            return {}, ask.views
        start = self._parts.take(ask.shared_bytes)
        if start is None:
            return {}, ask.views
        ask.part = (start, ask.shared_bytes)
        if ask.views:
            self.memory.copy_in(start, list(ask.views))
        return {"memory": list(ask.part)}, ()

    def read_memory(self, ask: Ask, head: Head) -> None:
        """The answer to this one has come: what is in the memory is taken, and its part is free again."""
        if ask.part is None or self.memory is None or self._parts is None:
            return
        if ask.into and "refused" not in head and not self.filled:
            self.memory.copy_out(ask.part[0], list(ask.into))
        self._parts.give_back(*ask.part)
        ask.part = None

    def is_silent(self, now: float) -> bool:
        """Nothing was sent or received for a while."""
        moved = self.stream.moved_bytes if self.stream is not None else 0
        if moved != self._moved[0]:
            self._moved = (moved, now)
        return bool(self.asks) and now - self._moved[1] > SILENT_S

    def place(self, head: Head, nbytes: int) -> Sequence[memoryview] | None:
        ask = self.asks.get(head.get("id", -1))
        if ask is None or "refused" in head:
            return None
        if ask.into is None:
            ask.body = memoryview(mmap.mmap(-1, nbytes))
            return [ask.body]
        if sum(view.nbytes for view in ask.into) != nbytes:
            raise ProtocolError(f"an answer of {nbytes} bytes, which is not what was asked for")
        self.filling, self.filled = head["id"], True
        return ask.into


class Asking:
    """`facts` is this thread's; `known` is called with it after each change of the ledger, in this thread."""

    def __init__(
        self,
        me: str,
        host: str,
        keys: Keys,
        open_ledger: Callable[[], Ledger],
        *,
        known: Callable[[RunFacts], None] = lambda facts: None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self._me = me
        self._host = host
        self._keys = keys
        self._known = known
        self._patience_s = patience_s
        self.shared_bytes = 0  # of the memory that is shared with each server of this host; set before the first ask
        self.facts = RunFacts()
        self._wires: dict[str, Wire] = {}
        self._dialling: set[str] = set()
        self._parked: list[Ask] = []
        self._last_id = 0
        self._mailbox = Mailbox()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._mailbox.fd, selectors.EVENT_READ, None)
        self._closing = False
        self._follower = LedgerFollower(open_ledger, self._mailbox.put, "holdfast-slices-watch")
        self._thread = threading.Thread(target=self._run, name="holdfast-slices", daemon=True)
        self._follower.start()
        self._thread.start()

    def submit(self, asks: Sequence[Ask]) -> None:
        """From any thread."""
        self._mailbox.put(list(asks))

    def close(self) -> None:
        self._closing = True
        self._mailbox.wake()
        self._thread.join(timeout=5.0)
        self._follower.close()

    # ---- the thread

    def _run(self) -> None:
        next_tick = 0.0
        while not self._closing:
            patience_s = None if not self._parked and not self._wires else TICK_S
            for key, mask in self._selector.select(patience_s):
                if key.data is None:
                    for item in self._mailbox.take_all():
                        self._hear(item)
                else:
                    self._attend(key.data, mask)
            for wire in [one for one in self._wires.values() if one.stream is not None and one.stream.has_more]:
                self._attend(wire, selectors.EVENT_READ)
            now = time.monotonic()
            if now >= next_tick:
                next_tick = now + TICK_S
                self._tick(now)
        for wire in list(self._wires.values()):
            self._cut(wire)
        for ask in self._parked:
            ask.failed(PeerError("the connection to the servers was closed"))
        self._selector.close()

    def _hear(self, item: object) -> None:
        if isinstance(item, list):
            now = time.monotonic()
            for ask in item:
                ask.deadline = ask.deadline or now + self._patience_s
                self._route(ask, now)
        elif isinstance(item, LedgerWhole):
            for value in (*self.facts.missing_from(item.values), *item.values):
                self._learn(value)
            self._known(self.facts)
        elif isinstance(item, LedgerValue):
            self._learn(item)
            self._known(self.facts)
        elif isinstance(item, Dialled):
            self._dialled(item)

    def _learn(self, value: LedgerValue) -> None:
        try:
            learned = self.facts.learn(value)
        except ProtocolError:
            return  # the servers say so
        now = time.monotonic()
        for name, configuration, _ in learned.configured:
            for wire in list(self._wires.values()):
                if wire.server != configuration.primary:
                    self._take_back(wire, [n for n, ask in wire.asks.items() if ask.slice == name], now)
        for server, _ in learned.exited:
            if server in self._wires:
                self._cut(self._wires[server])
        if learned.configured or learned.exited or value.key.startswith("server/"):
            parked, self._parked = self._parked, []
            for ask in parked:
                ask.hint = ""
                self._route(ask, now)

    def _tick(self, now: float) -> None:
        due = [ask for ask in self._parked if ask.again_at <= now]
        self._parked = [ask for ask in self._parked if ask.again_at > now]
        for ask in due:
            self._route(ask, now)
        for wire in list(self._wires.values()):
            if wire.is_silent(now):
                self._take_back(wire, [n for n, ask in wire.asks.items() if now - ask.asked_at > SILENT_S], now)

    # ---- asking

    def _server_for(self, ask: Ask) -> str:
        if ask.hint:
            return ask.hint
        known = self.facts.configurations.get(ask.slice)
        if known is None:
            return ""
        configuration = known[0]
        if ask.anywhere and ask.attempts:
            return configuration.replicas[ask.attempts % len(configuration.replicas)]
        return configuration.primary

    def _route(self, ask: Ask, now: float) -> None:
        if now >= ask.deadline:
            ask.failed(PeerError(f"no server has answered for {ask.slice} within {self._patience_s:g} s"))
            return
        server = self._server_for(ask)
        wire = self._wires.get(server)
        if wire is None:
            registration = self.facts.servers.get(server)
            ask.hint = ""
            if registration is None:
                self._park(ask, now + AGAIN_S)
                return
            local = bool(self.shared_bytes and registration.local and registration.host == self._host)
            memory = WorkerMemory.create(self.shared_bytes) if local else None
            wire = self._wires[server] = Wire(server, memory)
            dial = dialler(registration, self._host, self._keys, (SLICES, self._me), memory)

            def run() -> None:
                try:
                    sock: socket.socket | None = dial()
                except (PeerError, OSError, ValueError):
                    sock = None
                self._mailbox.put(Dialled(server, sock))

            threading.Thread(target=run, name=f"holdfast-dial-{server}", daemon=True).start()
        self._last_id += 1
        ask.server, ask.asked_at = server, now
        ask.attempts += 1
        wire.asks[self._last_id] = ask
        if wire.stream is not None:
            self._send(wire, self._last_id, ask)

    def _park(self, ask: Ask, until: float) -> None:
        ask.again_at = until
        self._parked.append(ask)

    def _send(self, wire: Wire, number: int, ask: Ask) -> None:
        assert wire.stream is not None
        memory, views = wire.through_memory(ask)
        head = {**ask.head, **memory, "slice": ask.slice, "id": number}
        wire.stream.send(Outgoing(encode_frame(head, views)))
        self._flush(wire)

    def _flush(self, wire: Wire) -> None:
        if wire.stream is None:
            return
        try:
            wire.stream.flush()
        except (PeerError, OSError, ValueError):
            self._cut(wire)
            return
        self._rewatch(wire)

    def _rewatch(self, wire: Wire) -> None:
        stream = wire.stream
        if stream is not None and self._selector.get_key(stream.sock).events != stream.events:
            self._selector.modify(stream.sock, stream.events, wire)

    def _dialled(self, item: Dialled) -> None:
        wire = self._wires.get(item.server)
        if wire is None or wire.stream is not None:
            if item.sock is not None:
                item.sock.close()
            return
        if item.sock is None:
            self._cut(wire)
            return
        wire.stream = FrameStream(item.sock, wire.place)
        self._selector.register(item.sock, wire.stream.events, wire)
        for number, ask in list(wire.asks.items()):
            if self._wires.get(item.server) is wire:
                self._send(wire, number, ask)

    def _take_back(self, wire: Wire, numbers: Sequence[int], now: float) -> None:
        """These requests are sent again, elsewhere or here."""
        shared = any(wire.asks[number].part is not None for number in numbers)
        if shared or wire.filling in numbers or (numbers and wire.stream is not None and wire.stream.queued_bytes):
            self._cut(wire)  # it stands in the middle of one of them, or may write to its memory later
            return
        for number in numbers:
            ask = wire.asks.pop(number)
            self._route(ask, now)

    def _cut(self, wire: Wire) -> None:
        """The connection is over: whatever was asked there is asked again."""
        if wire.stream is not None:
            self._selector.unregister(wire.stream.sock)
            wire.stream.close()
        if wire.memory is not None:
            wire.memory.close()
        del self._wires[wire.server]
        asks, wire.asks = list(wire.asks.values()), {}
        now = time.monotonic()
        for ask in asks:
            if self._closing:
                ask.failed(PeerError("the connection to the servers was closed"))
            else:
                self._park(ask, now + AGAIN_S)

    # ---- answers

    def _attend(self, wire: Wire, mask: int) -> None:
        if self._wires.get(wire.server) is not wire or wire.stream is None:
            return
        try:
            if mask & selectors.EVENT_WRITE:
                wire.stream.flush()
            if mask & selectors.EVENT_READ:
                wire.stream.receive(lambda head, nbytes: self._answered(wire, head))
        except (PeerError, OSError, ValueError):
            if self._wires.get(wire.server) is wire:
                self._cut(wire)
            return
        if self._wires.get(wire.server) is wire:
            self._rewatch(wire)

    def _answered(self, wire: Wire, head: Head) -> None:
        wire.filling = 0
        ask = wire.asks.pop(head.get("id", -1), None)
        if ask is None:
            return
        wire.read_memory(ask, head)
        wire.filled = False
        if "refused" not in head:
            ask.done(ask, head)
            return
        reason, kind = str(head["refused"])[:500], head.get("kind")
        error: Exception | None = {
            "diverged": DivergedError(reason),
            "wrong": ProtocolError(reason),
            "gone": Evicted(reason),
            "failed": PeerError(reason),
        }.get(str(kind))
        if error is not None:
            ask.failed(error)
            return
        hint = head.get("primary")
        ask.hint = hint if isinstance(hint, str) and hint != wire.server else ""
        self._park(ask, time.monotonic() + (0.0 if ask.hint or kind == "not yet" else AGAIN_S))
