"""A worker's requests to slices: who is asked, and asked again, until there is an answer. One thread owns it all.

A request goes to the slice's primary, which the ledger names. When the connection breaks, when another server has
become the primary, or when the one that was asked sends it elsewhere, it is sent again as it is: servers know an update
by its worker, incarnation and sequence, so nothing is applied twice.

Answers go straight into the memory that the request names. An answer that is not waited for any more is thrown away:
it is known by its id, and a request that is sent again has another one.
"""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from holdfast.core.errors import ConfigError, DivergedError, Evicted, PeerError, ProtocolError
from holdfast.ledger.port import Ledger
from holdfast.net.mailbox import Mailbox
from holdfast.servers.connections import SLICES
from holdfast.servers.frames import FrameStream, Head, Outgoing, encode_frame
from holdfast.servers.ledger_line import LedgerFollower, LedgerValue, LedgerWhole
from holdfast.servers.links import Dialled, DialledBox, dialler
from holdfast.servers.run_facts import RunFacts
from holdfast.servers.wires import SILENT_S, Wire, hinted
from holdfast.servers.worker_memory import WorkerMemory
from holdfast.trust.keys import Keys

AGAIN_S = 0.02  # after a server has said that it cannot answer now
PATIENCE_S = 120.0  # in all
TICK_S = 0.02
STARTED_OVER = "slices were lost with all their replicas, and all begin anew from the newest checkpoint"


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
    at: str = ""  # this server is asked, whoever the primary is
    body: memoryview = field(default_factory=lambda: memoryview(b""))
    deadline: float = 0.0
    server: str = ""  # that was asked last
    asked_at: float = 0.0
    again_at: float = 0.0
    hint: str = ""
    attempts: int = 0
    why: str = ""  # there is no answer, as far as that is known; other threads read it
    part: tuple[int, int] | None = None  # of the memory that is shared with the server: where, and how long

    @property
    def shared_bytes(self) -> int:
        """How much could pass through shared memory."""
        return sum(view.nbytes for view in self.views or self.into or ())


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
        self._moved_before = 0  # bytes, over connections that are gone
        self._mailbox = Mailbox()
        self._dialled_box = DialledBox(self._mailbox)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._mailbox.fd, selectors.EVENT_READ, None)
        self._closing = False
        self._began_at: int | None = None  # how often slices had been lost when this worker came
        self._is_over = False
        self._follower = LedgerFollower(open_ledger, self._mailbox.put, "holdfast-slices-watch")
        self._thread = threading.Thread(target=self._run, name="holdfast-slices", daemon=True)
        self._follower.start()
        self._thread.start()

    def submit(self, asks: Sequence[Ask]) -> None:
        """From any thread."""
        self._mailbox.put(list(asks))

    @property
    def moved_bytes(self) -> int:
        """Over sockets, sent and received. From any thread; exact while nothing is under way."""
        streams = [wire.stream for wire in list(self._wires.values())]
        return self._moved_before + sum(stream.moved_bytes for stream in streams if stream is not None)

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
                    self._hear_all()
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
        self._dialled_box.close()
        self._selector.close()

    def _hear_all(self) -> None:
        """In a frame of its own: a name for the last request would keep its gradient."""
        for item in self._mailbox.take_all():
            self._hear(item)

    def _hear(self, item: object) -> None:
        if isinstance(item, list):
            now = time.monotonic()
            for ask in item:
                ask.deadline = ask.deadline or now + self._patience_s
                self._route(ask, now)
        elif isinstance(item, LedgerWhole):
            for value in (*self.facts.missing_from(item.values), *item.values):
                self._learn(value)
            self._began_at = self.facts.started_over if self._began_at is None else self._began_at
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
        if self._began_at is not None and self.facts.started_over > self._began_at:
            self._end_all()
            return
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

    def _end_all(self) -> None:
        """What this worker knows was given up: it must not go on with the slices that take their place."""
        self._is_over = True
        for wire in list(self._wires.values()):
            self._cut(wire)
        parked, self._parked = self._parked, []
        for ask in parked:
            ask.failed(Evicted(STARTED_OVER))

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
        if ask.at:
            return ask.at
        if ask.hint:
            hint, ask.hint = ask.hint, ""  # once: it may name a server that does not answer
            return hint
        known = self.facts.configurations.get(ask.slice)
        if known is None:
            return ""
        configuration = known[0]
        if ask.anywhere and ask.attempts:
            return configuration.replicas[ask.attempts % len(configuration.replicas)]
        return configuration.primary

    def _route(self, ask: Ask, now: float) -> None:
        if self._is_over:
            ask.failed(Evicted(STARTED_OVER))
            return
        if now >= ask.deadline:
            ask.failed(PeerError(f"no server has answered for {ask.slice} within {self._patience_s:g} s"))
            return
        server = self._server_for(ask)
        wire = self._wires.get(server)
        if wire is None:
            registration = self.facts.servers.get(server)
            if registration is None:
                ask.why = f"{server}, its primary, is gone" if server else "no server has it"
                self._park(ask, now + AGAIN_S)
                return
            local = bool(self.shared_bytes and registration.local and registration.host == self._host)
            memory = WorkerMemory.create(self.shared_bytes) if local else None
            wire = owner = self._wires[server] = Wire(server, memory)
            dial = dialler(registration, self._host, self._keys, (SLICES, self._me), memory)

            def run() -> None:
                try:
                    sock: socket.socket | None = dial()
                except (PeerError, OSError, ValueError):
                    sock = None
                self._dialled_box.put(Dialled(server, sock, owner))

            threading.Thread(target=run, name=f"holdfast-dial-{server}", daemon=True).start()
        self._last_id += 1
        ask.server, ask.asked_at = server, now
        ask.attempts += 1
        wire.add(self._last_id, ask)
        self._send_ready(wire)

    def _park(self, ask: Ask, until: float) -> None:
        ask.again_at = until
        self._parked.append(ask)

    def _send_ready(self, wire: Wire) -> None:
        """What may be sent to this server now, as long as its connection lasts."""
        if wire.stream is None or self._wires.get(wire.server) is not wire:
            return
        for number in wire.ready():
            ask = wire.asks[number]
            ask.asked_at = time.monotonic()
            memory, views = wire.through_memory(ask)
            head = {**ask.head, **memory, "slice": ask.slice, "id": number}
            wire.stream.send(Outgoing(encode_frame(head, views)))
            self._flush(wire)
            if self._wires.get(wire.server) is not wire:
                return

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
        # It may be late, and of a wire before this one: that one's memory went with the greeting, not this one's.
        if wire is None or wire is not item.owner or wire.stream is not None:
            if item.sock is not None:
                item.sock.close()
            return
        if item.sock is None:
            self._cut(wire)
            return
        wire.stream = FrameStream(item.sock, wire.place)
        self._selector.register(item.sock, wire.stream.events, wire)
        self._send_ready(wire)

    def _take_back(self, wire: Wire, numbers: Sequence[int], now: float) -> None:
        """These requests are sent again, elsewhere or here."""
        shared = any(wire.asks[number].part is not None for number in numbers)
        if shared or wire.filling in numbers or (numbers and wire.stream is not None and wire.stream.queued_bytes):
            self._cut(wire)  # it stands in the middle of one of them, or may write to its memory later
            return
        for number in numbers:
            ask = wire.remove(number)
            if ask is not None:  # else the connection has ended meanwhile
                self._route(ask, now)
        self._send_ready(wire)

    def _cut(self, wire: Wire) -> None:
        """The connection is over: whatever was asked there is asked again."""
        if wire.stream is not None:
            self._selector.unregister(wire.stream.sock)
            self._moved_before += wire.stream.moved_bytes
            wire.stream.close()
        if wire.memory is not None:
            wire.memory.close()
        del self._wires[wire.server]
        asks, wire.asks = list(wire.asks.values()), {}
        now = time.monotonic()
        for ask in asks:
            ask.why = f"the connection to {wire.server} is lost"
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
        ask = wire.remove(head.get("id", -1))
        if ask is None:
            return
        wire.read_memory(ask, head)
        wire.filled = False
        self._send_ready(wire)  # before this answer is looked at, so that the server has something to do meanwhile
        self._judge(wire, ask, head)

    def _judge(self, wire: Wire, ask: Ask, head: Head) -> None:
        if "refused" not in head:
            ask.done(ask, head)
            return
        reason, kind = str(head["refused"])[:500], head.get("kind")
        error: Exception | None = {
            "diverged": DivergedError(reason),
            "wrong": ProtocolError(reason),
            "gone": Evicted(reason),
            "failed": PeerError(reason),
            "too large": ConfigError(reason, hint="start more servers, on hosts with more memory, or --replicas fewer"),
        }.get(str(kind))
        if error is not None:
            ask.failed(error)
            return
        known = self.facts.configurations.get(ask.slice)
        ask.hint = hinted(head, wire.server, known[0].epoch if known is not None else 0)
        ask.why = reason
        self._park(ask, time.monotonic() + (0.0 if ask.hint or kind == "not yet" else AGAIN_S))
