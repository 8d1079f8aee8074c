"""Frames between workers and servers: a head of plain values and, behind it, bytes that go straight to their place.

    length of the head (4 bytes), length of the body (8 bytes), the head as JSON, the body

`FrameStream` is a connection that never waits: its owner has a loop around a selector, and calls `receive` when there
is something to read and `flush` when there is room to write. Bodies are sent from the memory in which they lie, and are
read into memory that the owner names once it has seen the head. Who asks for too much is hung up on before memory is
taken for it.
"""

from __future__ import annotations

import mmap
import selectors
import socket
import ssl
import struct
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from holdfast.core.errors import PeerError, ProtocolError
from holdfast.core.words import decode_json, encode_json
from holdfast.net.proving import BLOCKED
from holdfast.net.streams import Deadline, receive, receive_into, send
from holdfast.servers.buffers import BufferPool
from holdfast.servers.replicated import HEAD_BYTES_MAX

BODY_BYTES_MAX = 1 << 40
VIEWS_MAX = 512  # in one system call
TLS_BYTES = 256 * 1024
TURN_BYTES = 8 * 1024 * 1024  # read of one connection before the others have their turn
SCRATCH_BYTES = 1 << 18
WAKE_BYTES = 512 * 1024  # of a body: who is woken for less is busy with waking up
_LENGTHS = struct.Struct("!IQ")

Head: TypeAlias = dict[str, Any]


class Later(Exception):
    """Raised by whoever places bodies: there is no room now. The connection is not read until `resume`."""


@dataclass(eq=False)
class Outgoing:
    """A frame on its way. `views` are those that are not sent yet; `sent` is called once, when all are, or never will.

    `is_live`: the views are of memory that its owner is going to change; `detach` makes it independent of that.
    """

    views: list[memoryview]
    sent: Callable[[], None] = lambda: None
    is_live: bool = False
    nbytes: int = field(init=False)
    whole_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = self.whole_bytes = sum(view.nbytes for view in self.views)

    def detach(self, pool: BufferPool) -> None:
        if not self.is_live or not self.views:
            return
        self.is_live = False
        # As large as the whole frame: there are few such sizes, so that the memory is used again.
        buffer, sent, position = pool.get(self.whole_bytes), self.sent, 0
        for view in self.views:
            buffer.view[position : position + view.nbytes] = view
            position += view.nbytes

        def free() -> None:
            buffer.release()
            sent()

        self.views, self.sent = [buffer.view[:position]], free

    def give_up(self) -> None:
        """What is not sent now never will be."""
        self.views, self.nbytes = [], 0
        self.sent()

    def advance(self, moved: int) -> bool:
        """So much was sent; True: all of it."""
        self.nbytes -= moved
        done = 0
        while done < len(self.views) and moved >= self.views[done].nbytes:
            moved -= self.views[done].nbytes
            done += 1
        del self.views[:done]
        if moved:
            self.views[0] = self.views[0][moved:]
        return not self.views


def encode_frame(head: Head, views: Sequence[memoryview]) -> list[memoryview]:
    data = encode_json(head)
    assert len(data) <= HEAD_BYTES_MAX, len(data)
    body = sum(view.nbytes for view in views)
    return [memoryview(_LENGTHS.pack(len(data), body) + data), *(view for view in views if view.nbytes)]


class FrameStream:
    """`place` is given a head and the length of its body, and returns where the body goes: views of as many bytes
    together, or None for a body that nobody wants. ProtocolError hangs up.
    """

    def __init__(self, sock: socket.socket, place: Callable[[Head, int], Sequence[memoryview] | None]) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._place = place
        self._is_tls = isinstance(sock, ssl.SSLSocket)
        self._out: deque[Outgoing] = deque()
        self.queued_bytes = 0
        self.moved_bytes = 0  # sent and received
        self._start = bytearray()  # lengths and head, until they are whole
        self._wanted = _LENGTHS.size
        self._lengths: tuple[int, int] | None = None
        self._head: Head | None = None
        self._rest: list[memoryview] = []  # of the body: what is still to be filled
        self._rest_bytes = 0
        self._unwanted = 0  # bytes of a body that is thrown away
        self._wakes_late = sock.family in (socket.AF_INET, socket.AF_INET6) and not self._is_tls
        self._wake_bytes = 1
        self._waits = False  # for room
        self._scratch = memoryview(bytearray(SCRATCH_BYTES))

    # ---- sending

    def send(self, frame: Outgoing) -> None:
        """Queue it. Whoever sends much looks at `queued_bytes` before."""
        self._out.append(frame)
        self.queued_bytes += frame.nbytes

    def flush(self) -> bool:
        """Send what there is room for; True: everything is sent. OSError if the other side is gone."""
        while self._out:
            frame = self._out[0]
            try:
                if self._is_tls:
                    moved = self.sock.send(frame.views[0][:TLS_BYTES])
                else:
                    moved = self.sock.sendmsg(frame.views[:VIEWS_MAX])
            except BLOCKED:
                return False
            self.queued_bytes -= moved
            self.moved_bytes += moved
            if frame.advance(moved):
                self._out.popleft()
                frame.sent()
        return True

    @property
    def events(self) -> int:
        """What the selector should wait for."""
        wanted = 0 if self._waits else selectors.EVENT_READ
        return wanted | (selectors.EVENT_WRITE if self._out else 0)

    # ---- receiving

    @property
    def waits_for_room(self) -> bool:
        return self._waits

    @property
    def has_more(self) -> bool:
        """There is something to read that the selector does not see."""
        return self._is_tls and not self._waits and self.sock.pending() > 0  # type: ignore[attr-defined]

    def receive(self, take: Callable[[Head, int], None]) -> None:
        """Read what has come, and hand over each frame that is whole: its head, and the length of its body.

        PeerError if the other side hung up, OSError if it is gone.
        """
        left = TURN_BYTES
        self._waits = False
        while left > 0:
            try:
                if self._head is None and not self._begin():
                    return
                left -= self._fill(left)
            except BLOCKED:
                return
            if not self._rest_bytes and not self._unwanted:
                assert self._head is not None and self._lengths is not None
                head, body = self._head, self._lengths[1]
                self._head, self._lengths, self._wanted = None, None, _LENGTHS.size
                take(head, body)

    def _begin(self) -> bool:
        """Read lengths and head, and learn where the body goes. False: there is no room for it now."""
        while len(self._start) < self._wanted:
            more = self.sock.recv(self._wanted - len(self._start))
            if not more:
                raise PeerError("the other side hung up")
            self._start += more
            self.moved_bytes += len(more)
            if len(self._start) == self._wanted and self._lengths is None:
                self._lengths = _LENGTHS.unpack(self._start)
                if self._lengths[0] > HEAD_BYTES_MAX or self._lengths[1] > BODY_BYTES_MAX:
                    raise ProtocolError(f"a frame with a head of {self._lengths[0]} bytes")
                self._start.clear()
                self._wanted = self._lengths[0]
        assert self._lengths is not None
        head, body = decode_json(self._start), self._lengths[1]
        try:
            views = self._place(head, body) if body else []
        except Later:
            self._waits = True
            return False
        self._start.clear()
        self._head = head
        if views is None:
            self._unwanted = body
        else:
            self._rest = [view for view in views if view.nbytes]
            self._rest_bytes = sum(view.nbytes for view in self._rest)
            assert self._rest_bytes == body, (head, body)
            self._wake_at(self._rest_bytes)
        return True

    def _wake_at(self, missing: int) -> None:
        """Have the kernel wait until so many bytes are there, or enough of them to be worth it."""
        wanted = WAKE_BYTES if missing >= WAKE_BYTES else 1
        if self._wakes_late and wanted != self._wake_bytes:
            self._wake_bytes = wanted
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, wanted)

    def _fill(self, bytes_max: int) -> int:
        if self._unwanted:
            got = self.sock.recv_into(self._scratch[: min(SCRATCH_BYTES, self._unwanted)])
            self._unwanted -= got
        elif self._rest:
            if self._is_tls:
                got = self.sock.recv_into(self._rest[0])
            else:
                got = self.sock.recvmsg_into(self._rest[:VIEWS_MAX])[0]
            moved = got
            while self._rest and moved >= self._rest[0].nbytes:
                moved -= self._rest.pop(0).nbytes
            if moved:
                self._rest[0] = self._rest[0][moved:]
            self._rest_bytes -= got
            self._wake_at(self._rest_bytes)
        else:
            return 0
        if not got:
            raise PeerError("the other side hung up in the middle of a frame")
        self.moved_bytes += got
        return got

    def close(self) -> None:
        """Nothing more is sent: whoever waits for that is told."""
        self.sock.close()
        while self._out:
            self._out.popleft().give_up()
        self.queued_bytes = 0


def ask(sock: socket.socket, head: Head, deadline: Deadline) -> tuple[Head, memoryview]:
    """One question and its answer, on a connection that waits. PeerError or OSError if it does not come."""
    send(sock, deadline, encode_frame(head, ()))
    lengths = _LENGTHS.unpack(receive(sock, deadline, _LENGTHS.size))
    if lengths[0] > HEAD_BYTES_MAX or lengths[1] > BODY_BYTES_MAX:
        raise ProtocolError(f"a frame with a head of {lengths[0]} bytes")
    answer = decode_json(receive(sock, deadline, lengths[0]))
    body = memoryview(mmap.mmap(-1, lengths[1]) if lengths[1] else b"")
    receive_into(sock, deadline, [body] if lengths[1] else [])
    return answer, body
