"""A group: the connections of one worker to all other members of one view.

It belongs to the thread that runs the user's loop; only `ring` may be called by another. Connections are made by other
threads (listener.py, meeting.py) and handed over whole, already proven to belong to the run and to the view. When one
breaks, the owner closes the group, and by that every other member's: nobody waits for a time-out.

What the messages are is the business of whoever makes the group: it passes in a decoder, which turns the body of a
frame into a message and a note, and raises ProtocolError. A note that is a dictionary with a true "bulk" announces that
bulk data follows the frame.

Sockets do not block. Control frames are read whole; bulk data (network path) is moved by `exchange`, which sends to
and receives from all peers at once, so that full buffers on both sides cannot block each other.

Between hosts a socket may be a TLS socket. It hands out one record of 16 KB a call, so several calls are made for one
poll; and it may hold bytes of a record that were decrypted and not asked for yet, which no poll will show: whoever
reads less than there is looks at `pending` before it waits. When it has taken a part of a piece it does not say so, and
must be given the same piece again, or a longer one that begins with it: so all that is sent is cut in one way, from
the front in pieces of BULK_BYTES. A peer whose host does not answer is gone like any other.
"""

from __future__ import annotations

import select
import socket
import ssl
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from holdfast.core.errors import PeerError, ProtocolError
from holdfast.core.words import View
from holdfast.net.framing import take_frame
from holdfast.net.kernel import SYSTEM, Kernel
from holdfast.net.proving import BLOCKED
from holdfast.net.silence import LOOK_S, is_silent

Decode = Callable[[bytearray], tuple[Any, Any]]
FRAME_BYTES_MAX = 40 * 1024 * 1024  # of samples that one worker has read for all, most of all
READ = select.POLLIN | select.POLLRDHUP
GONE = select.POLLRDHUP | select.POLLHUP | select.POLLERR
RECEIVE_BYTES = 64 * 1024
BULK_BYTES = 1024 * 1024
RECORDS = 64  # of TLS, moved for one poll: as many bytes as without
SILENT = "its host does not answer"
ASK_S = 0.5  # while nothing moves, it is asked so often who is gone
ATTEND_MS = 1


@dataclass
class Connection:
    """One peer's end. `inbox` holds bytes that were read and not yet used, `outbox` those that did not fit."""

    peer: str
    sock: socket.socket
    memory: Any = None  # what it shares with us, of the kind that we share (greeting.py); closed with the connection
    inbox: bytearray = field(default_factory=bytearray)
    outbox: bytearray = field(default_factory=bytearray)
    paused: bool = False  # what comes next is bulk data, which `exchange` reads
    owes_bulk: bool = False  # what it was told last announces data
    held: bytearray = field(default_factory=bytearray)  # frames that go behind that
    silent: bool = False  # its host did not answer when we last looked
    lost: bool = False  # and its owner was told so
    records: int = field(init=False)  # how many reads a poll is worth

    def __post_init__(self) -> None:
        self.records = RECORDS if isinstance(self.sock, ssl.SSLSocket) else 1

    @property
    def pending(self) -> int:
        """Bytes that were decrypted and not asked for yet."""
        return self.sock.pending() if isinstance(self.sock, ssl.SSLSocket) else 0

    def close(self) -> None:
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
        if self.memory is not None:
            self.memory.close()


@dataclass(frozen=True)
class Said:
    peer: str
    message: Any
    note: Any


@dataclass(frozen=True)
class Gone:
    peer: str
    reason: str


class Group:
    """See the module. `members` that are not connected yet are simply not in `connections`."""

    def __init__(self, view: View, me: str, decode: Decode, kernel: Kernel = SYSTEM) -> None:
        self.kernel = kernel
        self.view = view
        self.me = me
        self._decode = decode
        self.connections: dict[str, Connection] = {}
        self._by_fd: dict[int, Connection] = {}
        self._poll = kernel.poll()
        self._early: list[bytes] = []  # broadcast before a connection was there
        self._look_at = 0.0
        self.closed = False

    @property
    def complete(self) -> bool:
        return len(self.connections) == len(self.view.members) - 1

    def add(self, connection: Connection) -> None:
        assert connection.peer not in self.connections
        connection.sock.setblocking(False)
        self.connections[connection.peer] = connection
        self._by_fd[connection.sock.fileno()] = connection
        self._poll.register(connection.sock.fileno(), READ)
        for data in self._early:
            self._send(connection, data)

    def watch(self, fd: int) -> None:
        """Let `poll` return early when this file descriptor is readable."""
        self._poll.register(fd, select.POLLIN)

    def broadcast(self, data: bytes, *, keep: bool = False) -> list[Gone]:
        """Send to all. `keep`: also to those that connect later."""
        if keep:
            self._early.append(data)
        return [gone for connection in self.connections.values() if (gone := self._send(connection, data))]

    def send(self, peer: str, data: bytes, *, bulk: bool = False) -> Gone | None:
        """`bulk`: it announces data that goes to this peer next. Frames wait behind that, until `release`."""
        gone = self._send(self.connections[peer], data)
        self.connections[peer].owes_bulk |= bulk
        return gone

    def release(self, peer: str) -> Gone | None:
        """The bulk data that was announced to this peer is sent, or is not needed: what was said meanwhile follows."""
        connection = self.connections[peer]
        connection.owes_bulk = False
        data, connection.held = bytes(connection.held), bytearray()
        return self._send(connection, data) if data else None

    def ring(self, peer: str, frame: bytes) -> None:
        """From any thread, on a connection where nothing else is sent: a frame too small to be cut.

        Where it does not fit, the peer has others of its kind to read. Nothing of the group changes.
        """
        connection = self.connections.get(peer)
        if connection is not None:
            with suppress(OSError):  # BLOCKED is one; a broken connection is seen when it is read
                connection.sock.send(frame)

    def _send(self, connection: Connection, data: bytes) -> Gone | None:
        if connection.owes_bulk:  # the peer would take it for a part of that
            connection.held += data
            return None
        if not connection.outbox:
            try:
                sent = connection.sock.send(data[:BULK_BYTES])
            except BLOCKED:
                sent = 0
            except OSError as error:
                return Gone(connection.peer, str(error))
            if sent == len(data):
                return None
            data = data[sent:]
        connection.outbox += data
        self._listen(connection, READ | select.POLLOUT)
        return None

    def poll(self, timeout_s: float) -> list[Said | Gone]:
        """What peers said. Waits for at least one of them, for the watched descriptor, or for the time."""
        news: list[Said | Gone] = []
        for fd, event in self._poll.poll(max(0.0, timeout_s) * 1000):
            connection = self._by_fd.get(fd)
            if connection is None:
                continue
            if event & select.POLLOUT:
                self._flush(connection)
            if connection.paused:
                if event & GONE:
                    news.append(self._lose(connection, "it closed the connection"))
            elif event & (select.POLLIN | GONE):
                self._receive(connection, news)
        return news or [self._lose(connection, SILENT) for connection in self.silent()]

    def silent(self) -> list[Connection]:
        """Connections to hosts that do not answer: found so twice in a row, as our own clock may have jumped."""
        now = self.kernel.now()
        if now < self._look_at:
            return []
        self._look_at = now + LOOK_S
        found = []
        for connection in self.connections.values():
            before, connection.silent = connection.silent, is_silent(connection.sock)
            if before and connection.silent and not connection.lost:
                found.append(connection)
        return found

    def _flush(self, connection: Connection) -> None:
        with suppress(OSError):  # a broken connection is seen when it is read
            sent = connection.sock.send(connection.outbox[:BULK_BYTES])
            del connection.outbox[:sent]
        if not connection.outbox:
            self._listen(connection, select.POLLRDHUP if connection.paused else READ)

    def _receive(self, connection: Connection, news: list[Said | Gone]) -> None:
        try:
            data = connection.sock.recv(RECEIVE_BYTES)  # more than a record of TLS: none of it stays pending
        except BLOCKED:
            return
        except OSError as error:
            news.append(self._lose(connection, str(error)))
            return
        if not data:
            news.append(self._lose(connection, "it closed the connection"))
            return
        connection.inbox += data
        try:
            news.extend(self._frames(connection))
        except ProtocolError as error:
            news.append(self._lose(connection, str(error)))

    def _listen(self, connection: Connection, mask: int) -> None:
        with suppress(OSError, KeyError, ValueError):  # lost already, and no longer polled
            self._poll.modify(connection.sock.fileno(), mask)

    def _lose(self, connection: Connection, reason: str) -> Gone:
        connection.lost = True
        with suppress(KeyError, ValueError):
            self._poll.unregister(connection.sock.fileno())
        return Gone(connection.peer, reason)

    def _frames(self, connection: Connection) -> Iterable[Said]:
        """Whole frames in the inbox. Stops behind one that announces bulk data: those bytes are not frames."""
        while (body := take_frame(connection.inbox, FRAME_BYTES_MAX)) is not None:
            message, note = self._decode(body)
            yield Said(connection.peer, message, note)
            if isinstance(note, dict) and note.get("bulk"):
                connection.paused = True
                self._listen(connection, select.POLLRDHUP)
                return

    def resume(self, peer: str) -> list[Said | Gone]:
        """The bulk data of this peer is read, and mine sent: speak in frames again, beginning with those that wait."""
        connection = self.connections[peer]
        connection.paused = False
        self._listen(connection, READ)
        gone = self.release(peer)
        news: list[Said | Gone] = [gone] if gone is not None else []
        try:
            news.extend(self._frames(connection))
        except ProtocolError as error:
            return [self._lose(connection, str(error))]
        if connection.pending and not connection.paused:
            self._receive(connection, news)
        return news

    def exchange(
        self,
        sends: Sequence[tuple[str, Sequence[memoryview]]],
        receives: Sequence[tuple[str, Sequence[memoryview]]],
        *,
        interrupted: Callable[[], str],
    ) -> None:
        """Move bulk data: to each peer its buffers in order, from each peer into its buffers in order.

        While nothing moves, `interrupted()` is asked for a peer that is gone. Raises BrokenGroup, which names the peer,
        then, when a connection breaks, or when a host does not answer.
        """
        _Exchange(self, sends, receives).run(interrupted)

    def attend(self, is_done: Callable[[], bool], *, interrupted: Callable[[], str]) -> None:
        """While something beside the connections is under way: see who is lost meanwhile. Nothing is read.

        Raises BrokenGroup as `exchange` does, when a connection ends, or when a host does not answer.
        """
        poll = self.kernel.poll()
        for connection in self.connections.values():
            poll.register(connection.sock.fileno(), select.POLLRDHUP | (select.POLLOUT if connection.outbox else 0))
        look_at = self.kernel.now() + ASK_S
        while not is_done():
            for fd, event in poll.poll(ATTEND_MS):
                connection = self._by_fd[fd]
                if event & GONE:
                    raise BrokenGroup(connection.peer, "it closed the connection")
                self._flush(connection)
                if not connection.outbox:
                    poll.modify(fd, select.POLLRDHUP)
            if self.kernel.now() < look_at:
                continue
            look_at = self.kernel.now() + ASK_S
            if lost := interrupted():
                raise BrokenGroup(lost, "its lease is gone")
            for connection in self.silent():
                raise BrokenGroup(connection.peer, SILENT)

    def flush(self, at_most_s: float) -> None:
        """Let those who still listen have what was said to them, before the connections are closed."""
        until = self.kernel.now() + at_most_s
        while any(one.outbox and not one.lost for one in self.connections.values()):
            if (left_s := until - self.kernel.now()) <= 0:
                return
            self.poll(left_s)

    def close(self) -> None:
        """Close all connections, so that every peer notices at once. References are dropped first and last."""
        connections, self.connections, self._by_fd = self.connections, {}, {}
        for connection in connections.values():
            connection.close()
        self._poll = self.kernel.poll()
        self.closed = True


class _Exchange:
    """One bulk exchange under way."""

    def __init__(
        self,
        group: Group,
        sends: Sequence[tuple[str, Sequence[memoryview]]],
        receives: Sequence[tuple[str, Sequence[memoryview]]],
    ) -> None:
        self._group = group
        self._out = {peer: [view for view in views if len(view)] for peer, views in sends}
        self._in = {peer: [view for view in views if len(view)] for peer, views in receives}
        self._in = {peer: views for peer, views in self._in.items() if views}
        for connection in group.connections.values():
            if connection.outbox:
                self._out.setdefault(connection.peer, []).insert(0, memoryview(bytes(connection.outbox)))
                connection.outbox.clear()
        self._out = {peer: views for peer, views in self._out.items() if views}

    def run(self, interrupted: Callable[[], str]) -> None:
        group = self._group
        poll = group.kernel.poll()
        masks: dict[str, int] = {}
        for peer in list(self._in):
            self._use_inbox(group.connections[peer])
            if peer in self._in and group.connections[peer].pending:
                self._move(group.connections[peer], select.POLLIN)
        while self._out or self._in:
            for peer, connection in group.connections.items():
                mask = (select.POLLOUT if peer in self._out else 0) | (READ if peer in self._in else 0)
                if masks.get(peer, 0) == mask:
                    continue
                if mask:
                    poll.register(connection.sock.fileno(), mask)
                else:
                    poll.unregister(connection.sock.fileno())  # done with it: its end must not keep the poll awake
                masks[peer] = mask
            events = poll.poll(ASK_S * 1000)
            if not events:
                if lost := interrupted():
                    raise BrokenGroup(lost, "its lease is gone")
                for connection in group.silent():
                    raise BrokenGroup(connection.peer, SILENT)
            for fd, event in events:
                self._move(group._by_fd[fd], event)

    def _move(self, connection: Connection, event: int) -> None:
        try:
            if event & select.POLLOUT and connection.peer in self._out:
                self._send(connection)
            if event & (select.POLLIN | GONE):
                if connection.peer in self._in:
                    self._receive(connection)
                elif event & GONE and connection.peer in self._out:
                    raise BrokenGroup(connection.peer, "it closed the connection")
        except OSError as error:
            raise BrokenGroup(connection.peer, str(error)) from error

    def _send(self, connection: Connection) -> None:
        peer = connection.peer
        with suppress(*BLOCKED):
            self._use(self._out, peer, connection.sock.send(self._out[peer][0][:BULK_BYTES]))

    def _receive(self, connection: Connection) -> None:
        peer, left = connection.peer, connection.records
        while left > 0 or connection.pending:
            try:
                count = connection.sock.recv_into(self._in[peer][0][:BULK_BYTES])
            except BLOCKED:
                return
            if count == 0:
                raise BrokenGroup(peer, "it closed the connection")
            self._use(self._in, peer, count)
            if peer not in self._in:
                return
            left -= 1

    def _use(self, waiting: dict[str, list[memoryview]], peer: str, count: int) -> None:
        """The first `count` bytes of what waits for this peer are done."""
        views = waiting[peer]
        views[0] = views[0][count:]
        if not len(views[0]):
            views.pop(0)
            if not views:
                del waiting[peer]

    def _use_inbox(self, connection: Connection) -> None:
        """Bulk bytes that came along with the last control frame."""
        inbox = connection.inbox
        while inbox and connection.peer in self._in:
            view = self._in[connection.peer][0]
            count = min(len(inbox), len(view))
            view[:count] = inbox[:count]
            del inbox[:count]
            self._use(self._in, connection.peer, count)


class BrokenGroup(PeerError):
    """A connection of the group broke during an exchange."""

    def __init__(self, peer: str, reason: str) -> None:
        super().__init__(f"lost {peer}: {reason}")
        self.peer = peer
        self.reason = reason
