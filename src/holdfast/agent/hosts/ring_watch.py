"""The agent's place in the ring of hosts: a thread that beats to the next two, hears the two before, and says who is
silent.

Threads: `holdfast-ring` alone touches the neighbours and the connections. `holdfast-ring-dial` (one for each host
that is to be connected to, short) and `holdfast-ring-try` (one for each host that is late, short) wait for the
network in its place, and put what came of it into its inbox. The ledger's news come through `listening`, in the
thread that follows the ledger. What others should know goes into the agent's inbox; the ledger, the disk and the
workers are the agent's.
"""

from __future__ import annotations

import os
import queue
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from holdfast.agent.hosts.ring_links import RING, BeatReader, answers, dial, frame, is_open
from holdfast.agent.ledger_watch import LedgerChange, LedgerContents, News
from holdfast.agent.workers.heartbeat_watch import Glance
from holdfast.core.errors import HoldfastError, PeerError, ProtocolError
from holdfast.core.words import KEY_HOSTS, KEY_VIEW, KEY_WORKERS, Registration, View, decode_json, host_of
from holdfast.detection.agent_beat import AgentBeat, CrewHealth
from holdfast.detection.giving_up import Case, GivingUp
from holdfast.detection.neighbours import LATE, SILENT, HostBack, Neighbours, Row
from holdfast.detection.ring import BEAT_S, LOOK_S
from holdfast.detection.standstill import Idle
from holdfast.net.acceptor import AcceptLimits, Acceptor
from holdfast.net.proving import Proving
from holdfast.trust.keys import Keys

LIMITS = AcceptLimits(unproven_max=64, greeting_s=5.0, connections_max=128)
REDIAL_S = 1.0
TRY_AFTER_S, TRY_AGAIN_S = 0.4, 1.0  # of silence, until it is tried whether something there answers; and again
TRIED_MAX = 3  # addresses of a host
LEASE_SHARE = 0.4  # of a worker's lease: who asks for longer leases asks for patience


@dataclass(frozen=True)
class RingNews:
    """An event for the log and, if a host is given up, the workers whose registrations are taken from the ledger."""

    kind: str
    fields: Mapping[str, Any]
    given_up: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Dialled:
    host: str
    address: str
    sock: socket.socket | None


@dataclass(frozen=True)
class _Tried:
    host: str
    reachable: bool


class RingWatch:
    """Beats until it is closed. Owns `server`."""

    def __init__(
        self,
        host: str,
        server: socket.socket,
        keys: Keys,
        *,
        glances: Callable[[], Mapping[str, Glance]],
        idle: Callable[[], Idle | None] = lambda: None,
        report: Callable[[RingNews], None],
        lease_s: float,
    ) -> None:
        self._keys = keys
        self._glances = glances
        self._idle = idle
        self._report = report
        self._neighbours = Neighbours(host, silent_s=LEASE_SHARE * lease_s)
        self._giving_up = GivingUp()
        self._addresses: dict[str, str] = {}  # of agents
        self._workers: dict[str, str] = {}  # addresses of registered workers
        self._members: frozenset[str] = frozenset()
        self._incoming: set[BeatReader] = set()
        self._outgoing: dict[str, tuple[str, socket.socket]] = {}
        self._dialling: dict[str, float] = {}  # host -> when it may be dialled again
        self._trying: dict[str, float] = {}  # host -> when it may be tried again
        self._tried: dict[str, bool] = {}  # hosts that are late: whether something there answered
        self._out_of_reach: frozenset[str] = frozenset()
        self._beat_at = 0.0
        self.rows: list[Row] = []  # the last look, for other threads: replaced, never changed
        self.sent_bytes = self.received_bytes = 0
        self.cost_s = 0.0  # processor time of the thread so far
        self._inbox: queue.SimpleQueue[News | _Dialled | _Tried] = queue.SimpleQueue()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._acceptor = Acceptor(
            self._selector,
            [server],
            greet=lambda sock, deadline: Proving(sock, keys, RING, deadline),
            welcome=self._welcome,
            limits=LIMITS,
            owned=lambda: len(self._incoming),
        )
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="holdfast-ring", daemon=True)
        self._thread.start()

    # ---- other threads

    def listening(self, post: Callable[[News], None]) -> Callable[[News], None]:
        """What the ledger says goes here first, then on to `post`."""

        def both(news: News) -> None:
            if isinstance(news, LedgerContents | LedgerChange):
                self._put(news)
            post(news)

        return both

    def close(self) -> None:
        self._stopping.set()
        self._ring_bell()
        self._thread.join(timeout=5.0)

    def _put(self, message: News | _Dialled | _Tried) -> None:
        self._inbox.put(message)
        self._ring_bell()

    def _ring_bell(self) -> None:
        with suppress(OSError, ValueError):
            os.eventfd_write(self._bell, 1)

    # ---- the thread

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._turn()
                self.cost_s = time.thread_time()
            self._send(self._neighbours.beat(self._crew(), time.monotonic(), out_of_reach=(), leaving=True))
        finally:
            self._close_all()

    def _turn(self) -> None:
        ready = self._selector.select(LOOK_S)
        now = time.monotonic()
        neighbours = self._neighbours
        neighbours.elapse(now)
        for key, _ in ready:
            if key.fd == self._bell:
                with suppress(BlockingIOError):
                    os.eventfd_read(self._bell)
            elif not self._acceptor.handle(key):
                self._hear(key.data, now)
        self._empty_inbox(now)
        for found in neighbours.look():
            self._tell("host_silent", host=found.host, phi=found.phi, seconds=found.seconds)
        self._acceptor.tend()
        self._try_the_late(now)
        self._consider_silent(now)
        if now >= self._beat_at:
            self._beat(now)

    def _empty_inbox(self, now: float) -> None:
        for _ in range(self._inbox.qsize()):
            message = self._inbox.get_nowait()
            match message:
                case LedgerContents(values):
                    self._addresses.clear()
                    self._workers.clear()
                    for key, value in values.items():
                        self._learn(key, value)
                    self._neighbours.arrange(self._addresses)
                case LedgerChange(change):
                    self._learn(change.key, change.value if change.kind == "put" else None)
                    if change.key.startswith(KEY_HOSTS):
                        self._neighbours.arrange(self._addresses)
                case _Dialled():
                    self._connected(message, now)
                case _Tried(host, reachable):
                    self._tried[host] = reachable
                    self._note_reach(now)

    def _learn(self, key: str, value: bytes | None) -> None:
        """Of the ledger: hosts with an agent that beats, workers' addresses, the view."""
        with suppress(ProtocolError):
            if key.startswith(KEY_HOSTS):
                host = key[len(KEY_HOSTS) :]
                self._addresses.pop(host, None)
                address = decode_json(value).get("ring") if value else None
                if isinstance(address, str) and address:  # else it is of an earlier version
                    self._addresses[host] = address
            elif key.startswith(KEY_WORKERS):
                self._workers.pop(key[len(KEY_WORKERS) :], None)
                if value:
                    self._workers[key[len(KEY_WORKERS) :]] = Registration.decode(value).address
            elif key == KEY_VIEW and value:
                self._members = frozenset(View.decode(value).members)

    # ---- hearing

    def _welcome(self, newcomer: Proving) -> None:
        link = BeatReader(newcomer.sock)
        self._incoming.add(link)
        self._selector.register(link.sock, selectors.EVENT_READ, link)

    def _hear(self, link: BeatReader, now: float) -> None:
        before = link.received_bytes
        try:
            beats = [AgentBeat.decode(data) for data in link.read()]
        except (PeerError, OSError):  # among these, what is no beat
            self._selector.unregister(link.sock)
            self._incoming.discard(link)
            link.sock.close()
            return
        self.received_bytes += link.received_bytes - before
        for beat in beats:
            for back in self._neighbours.take(beat, now):
                self._on_back(back)

    def _on_back(self, back: HostBack) -> None:
        self._tried.pop(back.host, None)
        self._tell("host_back", host=back.host, seconds=back.seconds)

    # ---- beating

    def _beat(self, now: float) -> None:
        self._beat_at = now + BEAT_S
        self._connect(now)
        self._send(self._neighbours.beat(self._crew(), now, out_of_reach=self._out_of_reach))
        self.rows = self._neighbours.rows(now)

    def _crew(self) -> CrewHealth:
        glances = self._glances()
        step = max((glance.step for glance in glances.values()), default=0)
        return CrewHealth.of({worker: glance.level for worker, glance in glances.items()}, step, self._idle())

    def _send(self, beat: AgentBeat) -> None:
        data = frame(beat.encode())
        for host, (_, sock) in tuple(self._outgoing.items()):
            try:
                if sock.send(data) != len(data):
                    raise PeerError("it does not read")
                self.sent_bytes += len(data)
            except (OSError, PeerError):
                self._outgoing.pop(host)
                sock.close()

    def _connect(self, now: float) -> None:
        """Be connected to those after us in the ring, as the ledger has them now, and to nobody else."""
        targets = {host: self._addresses[host] for host in self._neighbours.targets}
        for host, (address, sock) in tuple(self._outgoing.items()):
            if targets.get(host) != address or not is_open(sock):
                self._outgoing.pop(host)
                sock.close()
        for host, address in targets.items():
            if host not in self._outgoing and now >= self._dialling.get(host, 0.0):
                self._dialling[host] = float("inf")
                self._spawn("holdfast-ring-dial", lambda host=host, address=address: self._dial(host, address))  # type: ignore[misc]

    def _dial(self, host: str, address: str) -> None:
        try:
            sock = dial(address, self._keys)
        except (OSError, HoldfastError):
            self._put(_Dialled(host, address, None))
            return
        if self._stopping.is_set():  # nobody would take it
            sock.close()
        else:
            self._put(_Dialled(host, address, sock))

    def _connected(self, dialled: _Dialled, now: float) -> None:
        self._dialling[dialled.host] = now + REDIAL_S
        if dialled.sock is None:
            return
        if dialled.host in self._outgoing or self._addresses.get(dialled.host) != dialled.address:
            dialled.sock.close()
            return
        self._outgoing[dialled.host] = (dialled.address, dialled.sock)

    # ---- the late and the silent

    def _try_the_late(self, now: float) -> None:
        """Before anybody is called silent: does something there answer at all?"""
        late = [
            host
            for host in self._neighbours.watched
            if self._neighbours.level(host) in (LATE, SILENT) and self._neighbours.silent_s(host) >= TRY_AFTER_S
        ]
        for host in [host for host in self._tried if host not in late]:
            del self._tried[host]
            self._note_reach(now)
        for host in late:
            if now >= self._trying.get(host, 0.0):
                self._trying[host] = now + TRY_AGAIN_S
                there = [address for worker, address in sorted(self._workers.items()) if host_of(worker) == host]
                addresses = [self._addresses[host], *there][:TRIED_MAX]
                self._spawn(
                    "holdfast-ring-try",
                    lambda host=host, addresses=addresses: self._put(_Tried(host, answers(addresses))),  # type: ignore[misc]
                )

    def _note_reach(self, now: float) -> None:
        """What has changed is said at once: the other one that hears this host waits for it."""
        out = frozenset(host for host, reachable in self._tried.items() if not reachable)
        if out != self._out_of_reach:
            self._out_of_reach = out
            self._beat_at = now

    def _consider_silent(self, now: float) -> None:
        """Give up who is silent, if there is every reason to: see detection/giving_up.py."""
        for host in self._neighbours.silent():
            workers = tuple(sorted(worker for worker in self._workers if host_of(worker) == host))
            if not self._members.intersection(workers):
                continue  # they have been done without already
            case = Case(
                host=host,
                tried=host in self._tried,
                reachable=self._tried.get(host, False),
                confirmed_by=self._neighbours.confirmed(host, now),
                held_up_s=max(
                    (one.waits_s for name, one in self._glances().items() if name in self._members), default=0.0
                ),
            )
            decision = self._giving_up.decide(case, now)
            if decision.give_up:
                fields: dict[str, Any] = {
                    "host": host,
                    "workers": list(workers),
                    "phi": self._neighbours.phi(host),
                    "seconds": round(self._neighbours.silent_s(host), 2),
                    "noticed_by": self._neighbours.me,
                    "reason": decision.reason,
                }
                self._report(RingNews("host_given_up", fields, workers))

    # ---- small things

    def _tell(self, kind: str, **fields: Any) -> None:
        self._report(RingNews(kind, {**fields, "noticed_by": self._neighbours.me}))

    def _spawn(self, name: str, act: Callable[[], object]) -> None:
        threading.Thread(target=act, name=name, daemon=True).start()

    def _close_all(self) -> None:
        self._acceptor.close()
        for link in self._incoming:
            link.sock.close()
        for _, sock in self._outgoing.values():
            sock.close()
        self._selector.close()
        while not self._inbox.empty():
            message = self._inbox.get_nowait()
            if isinstance(message, _Dialled) and message.sock is not None:
                message.sock.close()
