"""A parameter server: the replicas of its slices, and one thread that owns them and all their connections.

The thread turns around a selector. It takes what workers and other servers have sent, gives it to the replica that it
is for, and sends what comes of it. It waits for nothing else: the ledger, dialling and fetching a snapshot have threads
of their own, which put what they find into its mailbox.

Bounds: a worker's update is read only when there is room for it among the payloads that are held, so that workers wait
in their sockets while the log is full. Updates that no majority has yet count too. What other servers send is bounded
by what they take from workers.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from holdfast.core.errors import PeerError, ProtocolError
from holdfast.core.words import Registration
from holdfast.ledger.port import Ledger
from holdfast.log import messages as m
from holdfast.log.rules import Rules
from holdfast.net.acceptor import AcceptLimits, Acceptor
from holdfast.net.mailbox import Mailbox
from holdfast.net.sockets import prepare
from holdfast.servers.buffers import BufferPool, KeptPayload, PoolShare
from holdfast.servers.connections import SLICES, Inbound, Requests, ServerGreeting
from holdfast.servers.durable import DurableSlices, OnDisk
from holdfast.servers.fetching import Fetched, FetchFailed, fetch_snapshot
from holdfast.servers.frames import FrameStream, Outgoing, encode_frame
from holdfast.servers.ledger_line import LedgerAnswers, LedgerLine, LedgerValue, LedgerWhole
from holdfast.servers.links import LOG, Dialled, DialledBox, Link, dialler
from holdfast.servers.replica import Replica
from holdfast.servers.replicated import Answer, ReplicatedState
from holdfast.servers.run_facts import RunFacts
from holdfast.servers.storing import DiskStorage, LogStorage, MemoryStorage, kept_in
from holdfast.trust.keys import Keys

REPLICAS_MAX = 4096
TELL_BYTES = 1 << 20
COPIES_BYTES_MAX = 32 << 20  # of memory that is kept for them
LINK_BYTES_MAX = 1 << 31  # queued to one server; the log's own bound is much lower
STUCK_LEASES = 4  # a server that takes nothing of what is queued to it for so long is hung up on; 1: it is not there

Kinds = Mapping[str, Callable[[], ReplicatedState]]


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """`log_bytes_max`: of payloads that are held, in the log and on their way into it, with those of others' slices.

    `directory`: where logs are kept, for updates that count when they are on disk; None: memory is enough.
    """

    log_bytes_max: int = 1 << 30
    directory: Path | None = None
    started_over: int | None = None  # how often slices had been lost when what is there was begun; None: it is empty
    lease_s: float = 3.0  # of the registration in the ledger
    rules: Rules | None = None  # None: those below

    @property
    def log_rules(self) -> Rules:
        """In memory a snapshot costs nothing, so logs are short, and their memory is used again soon.

        A gradient is as large as what it changes: whoever lacks one may as well fetch the slice.
        """
        if self.rules is not None:
            return self.rules
        if self.directory is None:
            return Rules(
                snapshot_every=16,
                kept_behind=8,
                snapshot_bytes=4 << 20,
                kept_behind_bytes=4 << 20,
                under_way_bytes_max=32 << 20,
                tell_bytes=TELL_BYTES,
            )
        return Rules(
            durable=True,
            snapshot_every=256,
            kept_behind=32,
            snapshot_bytes=256 << 20,
            kept_behind_bytes=64 << 20,
            under_way_bytes_max=64 << 20,
            tell_bytes=TELL_BYTES,
        )


class Account(Protocol):
    """What is told of a server from outside: account.py."""

    def confirmed(self, peer: str, after_s: float) -> None: ...

    def dropped(self, replica: Replica) -> None: ...

    def look(self, now: float, replicas: Mapping[str, Replica], log_bytes: int) -> None: ...


class SliceServer:
    """`kinds`: how a state of each kind of slice begins. `on_turn` is called at every turn: it is not stuck."""

    def __init__(
        self,
        registration: Registration,
        sockets: Sequence[socket.socket],
        keys: Keys,
        open_ledger: Callable[[], Ledger],
        kinds: Kinds,
        settings: ServerSettings | None = None,
        *,
        start: int = 1,
        on_turn: Callable[[], None] = lambda: None,
        tell: Callable[[str, str, str], None] = lambda name, decision, reason: None,
        account: Account,
    ) -> None:
        self.me = registration.id
        self._start = start
        self._host = registration.host
        self._keys = keys
        self._kinds = kinds
        self._settings = settings or ServerSettings()
        self._rules = self._settings.log_rules
        self._on_turn = on_turn
        self.tell = tell
        self.account = account
        self.pool = BufferPool(self._settings.log_bytes_max)
        self.led = PoolShare()  # of the pool, by what workers have pushed here
        self.copies = BufferPool(COPIES_BYTES_MAX)
        self.replicas: dict[str, Replica] = {}
        self.facts = RunFacts()
        self._requests = Requests(self)
        self._links: dict[str, Link] = {}
        self._retired: set[str] = set()
        self._cut_at = 0.0
        self._inbound: dict[int, Inbound] = {}
        self._inbound_count = 0
        self._mailbox = Mailbox()
        self._dialled = DialledBox(self._mailbox)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._mailbox.fd, selectors.EVENT_READ, self._mailbox)
        self._acceptor = Acceptor(
            self._selector,
            sockets,
            greet=lambda sock, deadline: ServerGreeting(sock, keys, deadline),
            welcome=self._welcome,
            limits=AcceptLimits(connections_max=1024),
            owned=lambda: len(self._inbound),
        )
        self._ledger = LedgerLine(open_ledger, registration, self._mailbox.put, lease_s=self._settings.lease_s)
        self._ledger_answers = True
        self._storage: LogStorage = MemoryStorage()
        self._disk: DurableSlices | None = None
        self._tick_s = self._rules.beat_s / 2
        self._next_tick = 0.0
        self._stopping = False
        self._began_at = self._settings.started_over  # how often slices had been lost when this server came
        self.now = time.monotonic()
        if self._settings.directory is not None:
            self._read_disk(self._settings.directory)

    def _read_disk(self, directory: Path) -> None:
        """What an earlier process of this server has left."""
        self._storage = storage = DiskStorage(directory, self._mailbox.put)
        self._disk = storage.slices
        for name in self._disk.names():
            if name.partition("/")[0] in self._kinds:
                found = self._disk.find(name)
                replica = self.replicas[name] = self._new_replica(name, found.stored)
                if found.state is not None:
                    replica.state.restore(found.state)
                payloads = [None if one is None else kept_in(self.pool, one) for one in found.payloads]
                replica.give_stored(found.stored.entries, payloads)

    # ---- its life

    def run(self) -> None:
        """Until `stop`, which may be called from any thread or signal handler."""
        self._ledger.start()
        if self._disk is not None:
            self._disk.start()
        while not self._stopping:
            self._turn()
        self._ledger.close()
        if self._disk is not None:
            self._disk.close()
        for inbound in list(self._inbound.values()):
            self._hang_up(inbound)
        for link in self._links.values():
            link.close()
        self._dialled.close()
        self._acceptor.close()
        self._selector.close()

    def stop(self) -> None:
        self._stopping = True
        self._mailbox.wake()

    def _turn(self) -> None:
        unseen = [one for one in self._inbound.values() if one.stream.has_more]
        patience_s = 0.0 if unseen else max(0.0, self._next_tick - time.monotonic())
        for key, mask in self._selector.select(patience_s):
            self.now = time.monotonic()
            if key.data is self._mailbox:
                for news in self._mailbox.take_all():
                    self._hear(news)
            elif isinstance(key.data, Inbound):
                self._attend(key.data, mask)
            elif isinstance(key.data, Link):
                self._flush_link(key.data)
            else:
                self._acceptor.handle(key)
        self.now = time.monotonic()
        for inbound in unseen:
            self._attend(inbound, selectors.EVENT_READ)
        if self.now >= self._next_tick:
            self._tick()
        for replica in list(self.replicas.values()):
            replica.after_changes(self.now)
        if self._retired:
            self._drop_retired()
        self._acceptor.tend()
        self._on_turn()

    def _tick(self) -> None:
        self._next_tick = self.now + self._tick_s
        alive = sorted(self.facts.servers)
        for replica in list(self.replicas.values()):
            replica.tick(self.now, alive)
            replica.note_gone(self.facts.gone, self.now)
            if replica.machine.is_left_over(self.now):
                self.tell(replica.name, "replicate no more", "it is not a replica, and nobody adds it")
                self._drop(replica.name)
        self._hang_up_on_stuck_servers()
        self.account.look(self.now, self.replicas, self.pool.used_bytes)
        for inbound in list(self._inbound.values()):
            if inbound.stream.waits_for_room:
                self._attend(inbound, selectors.EVENT_READ)

    def _drop_retired(self) -> None:
        """At once, before anything could be confirmed to whoever adds this server to the slice again."""
        for name in self._retired:
            if not self.replicas[name].machine.hears_primary:
                self._drop(name)
        self._retired.clear()

    def _drop(self, name: str) -> None:
        self.account.dropped(self.replicas[name])
        self.replicas.pop(name).close()
        self._storage.remove(name)

    # ---- connections

    def _welcome(self, greeting: ServerGreeting) -> None:
        prepare(greeting.sock)
        self._inbound_count += 1
        inbound = Inbound(self._inbound_count, greeting.sock, greeting.hello, self._requests, greeting.memory)
        self._inbound[inbound.number] = inbound
        self._selector.register(inbound.stream.sock, inbound.stream.events, inbound)

    def _attend(self, inbound: Inbound, mask: int) -> None:
        if inbound.number not in self._inbound:
            return
        try:
            if mask & selectors.EVENT_WRITE:
                inbound.stream.flush()
            if mask & selectors.EVENT_READ:
                inbound.stream.receive(inbound.take)
        except (PeerError, OSError, ValueError):
            self._hang_up(inbound)
            return
        self._rewatch(inbound.stream, inbound)

    def _rewatch(self, stream: FrameStream, owner: object) -> None:
        sock = stream.sock
        if sock.fileno() < 0:
            return
        known = self._selector.get_map().get(sock)
        if not stream.events:
            if known is not None:
                self._selector.unregister(sock)
        elif known is None:
            self._selector.register(sock, stream.events, owner)
        elif known.events != stream.events:
            self._selector.modify(sock, stream.events, owner)

    def _hang_up(self, inbound: Inbound) -> None:
        if self._inbound.pop(inbound.number, None) is not None:
            self._unwatch(inbound.stream.sock)
            inbound.close()

    def _unwatch(self, sock: socket.socket) -> None:
        if sock.fileno() >= 0 and sock in self._selector.get_map():
            self._selector.unregister(sock)

    def _hang_up_on_stuck_servers(self) -> None:
        """What is queued to a server that stands still, or is gone, must not take the room of what workers push."""
        for link in self._links.values():
            leases = STUCK_LEASES if link.server in self.facts.servers else 1
            if link.is_stuck(self.now, leases * self._rules.lease_s):
                reason = f"it takes nothing of the {link.waiting_bytes} bytes that are queued to it"
                self.tell("all slices", f"hang up on {link.server}", reason)
                if link.stream is not None:
                    self._unwatch(link.stream.sock)
                link.drop_queue()

    def _flush_link(self, link: Link) -> None:
        if link.stream is None:
            return
        try:
            link.stream.receive(lambda head, nbytes: None)  # nothing comes but the end
            link.stream.flush()
        except (PeerError, OSError, ValueError):
            self._unwatch(link.stream.sock)
            link.close()
            return
        self._rewatch(link.stream, link)

    # ---- what comes in

    def _hear(self, news: object) -> None:
        if isinstance(news, LedgerWhole):
            for value in (*self.facts.missing_from(news.values), *news.values):
                self._learn(value)
            self._began_at = self.facts.started_over if self._began_at is None else self._began_at
        elif isinstance(news, LedgerValue):
            self._learn(news)
        elif isinstance(news, Dialled):
            link = self._links.get(news.server)
            if link is not None:
                link.dialled(news.sock)
                self._flush_link(link)
            elif news.sock is not None:
                news.sock.close()
        elif isinstance(news, OnDisk):
            self._heard_of_disk(news)
        elif isinstance(news, LedgerAnswers):
            self._ledger_answers = news.answers
            for replica in list(self.replicas.values()):
                replica.happens(m.LedgerReached(news.answers), self.now)
        elif isinstance(news, Fetched):
            self._fetched(news)
        elif isinstance(news, FetchFailed) and news.name in self.replicas:
            self.replicas[news.name].happens(m.SnapshotFailed(news.asked, news.reason), self.now)

    def _learn(self, value: LedgerValue) -> None:
        try:
            event = self.facts.learn(value)
        except ProtocolError as error:
            self.tell(value.key, "cannot read the ledger's entry", error.message)
            return
        if self._began_at is not None and self.facts.started_over > self._began_at:
            # What is here was given up, and slices with the same names begin anew: it must not mix with them.
            self.tell("all slices", "end", "slices were lost, and all begin anew from a checkpoint")
            self.stop()
            return
        for name, configuration, revision in event.configured:
            if self.me in configuration.replicas or name in self.replicas:
                self._replica(name).happens(m.LedgerSaw(configuration, revision), self.now)
        for name, replica in list(self.replicas.items()):
            for server, start in event.exited:
                replica.happens(m.Exited(server, start), self.now)
            replica.target = self.facts.targets.get(name)

    def replica_for(self, name: str) -> Replica | None:
        """Made when it is first spoken to: a primary adds replicas that are not in the configuration yet."""
        if name in self.replicas:
            return self.replicas[name]
        if name.partition("/")[0] not in self._kinds or len(self.replicas) >= REPLICAS_MAX:
            return None
        replica = self._replica(name)
        if name in self.facts.configurations:
            replica.happens(m.LedgerSaw(*self.facts.configurations[name]), self.now)
        return replica

    def _replica(self, name: str) -> Replica:
        if name not in self.replicas:
            self.replicas[name] = self._new_replica(name, None)
            self.replicas[name].target = self.facts.targets.get(name)
            self.replicas[name].happens(m.LedgerReached(self._ledger_answers), self.now)
        return self.replicas[name]

    def _new_replica(self, name: str, stored: m.Stored | None) -> Replica:
        state = self._kinds[name.partition("/")[0]]()
        return Replica(
            name, self.me, state, self, self._storage, self._rules, now=self.now, start=self._start, stored=stored
        )

    def has_room_for(self, replica: Replica, nbytes: int) -> bool:
        """Whether a worker's update may be read now.

        It goes to the other replicas too, and as much comes from each of them: so a server takes its part of the bound.
        """
        share_bytes = self._settings.log_bytes_max // replica.copies
        if not self.led.used_bytes or self.led.used_bytes + nbytes <= share_bytes:
            return True
        if self.now - self._cut_at > self._tick_s:  # the logs are cut as far as they can be, now and then
            self._cut_at = self.now
            for one in self.replicas.values():
                one.happens(m.CutLog(), self.now)
        return self.led.used_bytes + nbytes <= share_bytes

    # ---- what replicas need (Surroundings)

    def send(self, peer: str, head: dict[str, Any], payloads: Sequence[KeptPayload]) -> None:
        link = self._links.get(peer)
        if link is None:
            link = self._links[peer] = Link(peer, lambda: self._dial(peer), self._dialled.put)
        for kept in payloads:
            kept.hold()

        def sent() -> None:
            for kept in payloads:
                kept.release()

        frame = Outgoing(encode_frame(head, [kept.payload.body for kept in payloads]), sent)
        if link.send(frame, self.now, LINK_BYTES_MAX):
            self._flush_link(link)

    def _dial(self, peer: str) -> socket.socket:
        """In a thread of its own. A server that starts again may be somewhere else."""
        registration = self.facts.servers.get(peer)
        if registration is None:
            raise PeerError(f"{peer} is not registered")
        return dialler(registration, self._host, self._keys, (LOG, self.me))()

    def answer(self, client: str, head: dict[str, Any], answer: Answer | None = None) -> Outgoing | None:
        number, _, request = client.partition(":")
        inbound = self._inbound.get(int(number))
        if inbound is None:
            return None
        views = inbound.shared_answer(int(request), answer.views) if answer is not None else ()
        frame = Outgoing(encode_frame({**head, "id": int(request)}, views))
        inbound.stream.send(frame)
        try:
            inbound.stream.flush()
        except (PeerError, OSError, ValueError):
            self._hang_up(inbound)
            return None
        self._rewatch(inbound.stream, inbound)
        return frame

    def propose(self, name: str, effect: m.Propose) -> None:
        self._ledger.propose(name, effect.configuration, effect.expected_revision)

    def fetch(self, name: str, peer: str, snapshot: m.Snapshot) -> None:
        registration = self.facts.servers.get(peer)
        if registration is None:
            self._mailbox.put(FetchFailed(name, snapshot, f"{peer} is not registered"))
            return
        dial = dialler(registration, self._host, self._keys, (SLICES, self.me))
        fetch_snapshot(name, snapshot, dial, self._mailbox.put)

    def _fetched(self, news: Fetched) -> None:
        if news.name not in self.replicas:
            return

        def take() -> None:
            if news.name in self.replicas:
                self.replicas[news.name].fetched(news.snapshot, news.asked, news.payload, self.now)

        self._storage.hold_fetched(news.name, news.snapshot, news.payload, take)

    def _heard_of_disk(self, news: OnDisk) -> None:
        assert self._disk is not None
        event = self._disk.heard(news)
        if event is not None and news.name in self.replicas:
            self.replicas[news.name].happens(event, self.now)

    def retired(self, name: str, reason: str) -> None:
        self._retired.add(name)

    def confirmed(self, peer: str, after_s: float) -> None:
        self.account.confirmed(peer, after_s)
