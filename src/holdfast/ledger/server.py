"""The embedded ledger's server: one thread, one loop, which alone owns the machine, the journal and the connections.

A write is decided by the machine, put on disk by the journal, committed to the machine, and only then answered and
shown to watches, so nothing that anyone heard of can be lost. A client that sends garbage, stalls or floods loses its
own connection and harms no other.

Time: the loop turns at least every TICK_S. When a turn took far longer, the process was stopped or its disk hung, and
nobody could renew a lease: all of them are put off by as long.
"""

from __future__ import annotations

import os
import selectors
import socket
import stat
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.core.errors import ConfigError, LedgerError, LedgerRefused, ProtocolError
from holdfast.ledger import wire
from holdfast.ledger.channel import check_socket_path
from holdfast.ledger.connection import ConnectionPatience, LedgerConnection, WatchCursor
from holdfast.ledger.journal import GARBAGE_BYTES_MAX, Journal
from holdfast.ledger.machine import LedgerMachine, Record
from holdfast.ledger.port import Entry, Reading
from holdfast.ledger.requests import perform
from holdfast.ledger.wire import LEDGER, Request
from holdfast.net.acceptor import AcceptLimits, Acceptor
from holdfast.net.proving import Proving
from holdfast.net.sockets import open_tcp, open_unix
from holdfast.trust.handshake import ServerHandshake
from holdfast.trust.keys import Keys

TICK_S = 0.2
REFUSED_EXPIRY_RETRY_S = 0.5
_ANNOUNCE_EVERY = 256  # revisions that may pass a watch by before it is told how far it is
_REQUESTS_PER_TURN = 64
_READ, _WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """Bounds that tests make smaller."""

    connections_max: int = 1024
    unproven_max: int = 128
    patience: ConnectionPatience = field(default_factory=ConnectionPatience)
    stall_s: float = 0.5  # a turn of the loop that took longer was a stall, and leases are put off by it
    garbage_bytes_max: int = GARBAGE_BYTES_MAX


class EmbeddedServer:
    """Serves the ledger in `directory` on `socket_path` to whoever knows `secret`; on TCP too where `listen` says so.

    `start` and `stop` are for the owner's thread; everything else happens in the server's own.
    """

    def __init__(
        self,
        directory: Path,
        socket_path: Path,
        secret: bytes,
        *,
        limits: ServerLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        listen: str = "",
        keys: Keys | None = None,
    ) -> None:
        """`listen`: also on TCP, "HOST" or "HOST:FIRST-LAST", for those who have these keys."""
        check_socket_path(socket_path)
        ServerHandshake(secret, LEDGER)  # raises ConfigError for a secret that is too short
        self._listen, self._keys = listen, keys or Keys.from_secret(secret)
        self.tcp_address = ""  # where it listens for other hosts, once it is started
        self._directory = directory
        self._socket_path = socket_path
        self._secret = secret
        self._limits = limits or ServerLimits()
        self._clock = clock
        self._thread: threading.Thread | None = None
        self._waker: socket.socket | None = None

    @property
    def address(self) -> str:
        return f"unix:{self._socket_path}"

    @property
    def alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Read the log back and listen. Raises ConfigError, StorageError or IntegrityError, here and not later."""
        assert self._thread is None, "started twice"
        journal, machine = Journal.open(
            self._directory, now=self._clock(), garbage_bytes_max=self._limits.garbage_bytes_max
        )
        try:
            _remove_stale(self._socket_path)
            listeners = [open_unix(self._socket_path)[0]]
            if self._listen:
                listener, self.tcp_address = self._open_tcp(listeners[0])
                listeners.append(listener)
        except BaseException:
            journal.close()
            raise
        woken, self._waker = socket.socketpair()
        loop = _Loop(machine, journal, listeners, woken, self._keys, self._limits, self._clock)
        self._thread = threading.Thread(target=self._run, args=(loop,), name="holdfast-ledger", daemon=True)
        self._thread.start()

    def _open_tcp(self, near: socket.socket) -> tuple[socket.socket, str]:
        """Where it listened before, if it did: clients come back to that."""
        try:
            return open_tcp(self.tcp_address.removeprefix("tcp:") or self._listen)
        except BaseException:
            near.close()
            raise

    def _run(self, loop: _Loop) -> None:
        # A method, so that the thread keeps this object: were it collected, its waker would close and end the loop.
        loop.run()

    def stop(self) -> None:
        """End the loop, close every connection and remove the socket. Twice is no error."""
        if self._thread is None or self._waker is None:
            return
        self._waker.close()
        self._thread.join()
        self._thread = self._waker = None


class _Loop:
    def __init__(
        self,
        machine: LedgerMachine,
        journal: Journal,
        listeners: list[socket.socket],
        woken: socket.socket,
        keys: Keys,
        limits: ServerLimits,
        clock: Callable[[], float],
    ) -> None:
        self._machine = machine
        self._journal = journal
        self._socket_path = Path(listeners[0].getsockname())
        self._woken = woken
        self._limits = limits
        self._clock = clock
        self._connections: set[LedgerConnection] = set()
        self._watchers: set[LedgerConnection] = set()
        self._busy: set[LedgerConnection] = set()  # they have more requests than their share of a turn
        self._selector = selectors.DefaultSelector()
        self._acceptor = Acceptor(
            self._selector,
            listeners,
            greet=lambda sock, deadline: Proving(sock, keys, LEDGER, deadline),
            welcome=self._welcome,
            limits=AcceptLimits(
                unproven_max=limits.unproven_max,
                greeting_s=limits.patience.handshake_s,
                connections_max=limits.connections_max,
            ),
            owned=lambda: len(self._connections),
            clock=clock,
        )
        self._expire_again_at = 0.0
        self._noted = clock()

    def run(self) -> None:
        self._selector.register(self._woken, _READ)
        checked = self._clock()
        try:
            while self._serve_once():
                # Requests first, then expiry: a renewal that has arrived counts, however late we read it.
                now = self._note_time()
                self._expire(now)
                self._feed_watchers()
                if now - checked >= TICK_S:
                    checked = now
                    self._close_the_late(now)
                    self._acceptor.tend()
                self._journal.compact_if_due(self._machine)
        finally:
            self._shut_down()

    # -- one turn

    def _note_time(self) -> float:
        """What time it is. If it was last asked for long ago, leases are put off by as long."""
        now = self._clock()
        if now - self._noted > self._limits.stall_s:
            self._machine.extend(now - self._noted)
        self._noted = now
        return now

    def _serve_once(self) -> bool:
        """Wait for something to do and do it. False when it is time to stop."""
        wait_s = min(TICK_S, max(self._machine.next_deadline, self._expire_again_at) - self._clock())
        ready = self._selector.select(0 if self._busy else max(wait_s, 0))
        self._note_time()
        busy, self._busy = self._busy, set()
        for connection in busy:
            self._serve(connection, 0)
        for key, events in ready:
            if key.fileobj is self._woken:
                return False
            if not self._acceptor.handle(key) and key.data in self._connections:  # not closed earlier in this turn
                self._serve(key.data, events)
        return True

    def _serve(self, connection: LedgerConnection, events: int) -> None:
        """Move one connection on as far as it goes without waiting."""
        try:
            if events & _READ and not connection.receive():
                self._close(connection)
                return
            for _ in range(_REQUESTS_PER_TURN):
                if not connection.flush():
                    break
                if connection.closing:
                    self._close(connection)
                    return
                if connection.watch is not None:
                    self._feed(connection, connection.watch)
                elif (request := connection.take_request()) is not None:
                    self._answer(connection, request)
                if not connection.sending:
                    break
            else:
                self._busy.add(connection)
        except (ProtocolError, OSError):
            # A stranger, a client with a bug, or one that is gone: that connection is over, nothing else is.
            self._close(connection)
            return
        # While an answer is on its way no more requests are read; a watcher is read to notice that it is gone.
        reading = 0 if connection.sending and connection.watch is None else _READ
        self._listen_for(connection, reading | (_WRITE if connection.sending else 0))
        connection.rearm(self._clock())

    def _answer(self, connection: LedgerConnection, request: Request) -> None:
        try:
            if request.op == "watch":
                connection.watch = WatchCursor(request.prefix, request.revision, request.revision)
                self._watchers.add(connection)
                self._feed(connection, connection.watch)
                return
            result = perform(self._machine, request, self._clock(), self._commit)
            if isinstance(result, Reading):
                connection.frames = wire.reading_frames(request.id, result.entries, result.revision)
            else:
                plain = wire.encode_entry(result) if isinstance(result, Entry) else result
                connection.send(wire.result_frame(request.id, plain))
        except LedgerError as error:
            connection.send(wire.error_frame(request.id, error))

    def _commit(self, record: Record) -> None:
        self._journal.append(record, self._machine)
        self._machine.commit(record, self._clock())

    # -- leases and watches

    def _expire(self, now: float) -> None:
        """End overdue leases. If the disk does not take it they stay alive, as nobody was told otherwise."""
        if now < self._expire_again_at:
            return
        try:
            while (record := self._machine.overdue(now)) is not None:
                self._commit(record)
        except LedgerRefused:
            self._expire_again_at = now + REFUSED_EXPIRY_RETRY_S

    def _feed_watchers(self) -> None:
        for connection in tuple(self._watchers):
            assert connection.watch is not None
            if connection.watch.revision != self._machine.revision and not connection.sending:
                self._serve(connection, 0)

    def _feed(self, connection: LedgerConnection, watch: WatchCursor) -> None:
        """Start sending what a watch has not seen. What it missed for good it is told, and it ends."""
        try:
            changes = self._machine.changes_after(watch.revision, watch.prefix)
        except LedgerError as error:
            connection.send(wire.error_frame(0, error))
            connection.closing = True
            return
        watch.revision = self._machine.revision
        if changes or watch.revision - watch.announced >= _ANNOUNCE_EVERY:
            watch.announced = watch.revision
            connection.frames = wire.change_frames(changes, watch.revision)

    # -- connections

    def _welcome(self, newcomer: Proving) -> None:
        connection = LedgerConnection(newcomer.sock, self._limits.patience)
        connection.rearm(self._clock())
        self._connections.add(connection)
        self._selector.register(connection.sock, _READ, connection)

    def _listen_for(self, connection: LedgerConnection, events: int) -> None:
        if self._selector.get_key(connection.sock).events != events:
            self._selector.modify(connection.sock, events, connection)

    def _close_the_late(self, now: float) -> None:
        for connection in [one for one in self._connections if one.deadline <= now]:
            self._close(connection)

    def _close(self, connection: LedgerConnection) -> None:
        self._connections.discard(connection)
        self._watchers.discard(connection)
        self._busy.discard(connection)
        self._selector.unregister(connection.sock)
        connection.sock.close()

    def _shut_down(self) -> None:
        # The name goes first: a client that finds it gone knows at once that nobody listens.
        self._socket_path.unlink(missing_ok=True)
        self._acceptor.close()
        for connection in tuple(self._connections):
            self._close(connection)
        self._selector.close()
        self._woken.close()
        self._journal.close()


def _remove_stale(path: Path) -> None:
    """Remove the socket that a dead server left behind; anything else there is not ours to remove."""
    try:
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
    except FileNotFoundError:
        return
    if is_socket:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            try:
                probe.connect(os.fspath(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
                return
            except OSError:
                pass  # somebody has it, if only too busy to answer
    raise ConfigError(
        f"{path} is in use",
        hint="another server listens there, or it is not a socket; choose another path",
    )
