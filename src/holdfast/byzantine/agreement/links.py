"""Connections of servers and clients: what goes out to a server, and what comes in.

Every connection proves that it belongs to the federation (net/proving.py) and says what it is for (net/greeting.py):
SERVERS for what servers tell each other, one way, from the one that dials; CLIENTS for questions and answers. Neither
proves who is at the other end. What is said proves itself, by signatures.

An `OutgoingLink` has a thread, which dials and sends. What does not get through is dropped, not kept for ever: the
machine says it again. An `IncomingLink` never waits, and belongs to the server's loop.
"""

from __future__ import annotations

import selectors
import socket
import threading
from collections import deque
from collections.abc import Callable

from holdfast.byzantine.agreement.canonical import decode, encode
from holdfast.byzantine.agreement.messages import KINDS, Message
from holdfast.core.errors import PeerError
from holdfast.net import framing
from holdfast.net.dialling import dial_purpose
from holdfast.net.greeting import NO_NUMBER, Hello
from holdfast.net.proving import BLOCKED
from holdfast.net.streams import Deadline, send
from holdfast.trust.keys import Keys

SERVERS, CLIENTS = "agreement", "federate"  # purposes
DIAL_S = 3.0
DIAL_AGAIN_S = 0.2
STALL_S = 10.0  # a connection that takes nothing for so long is given up
SEND_S = 600.0
QUEUED_MAX = 512
READ_BYTES = 256 * 1024
MESSAGE_EXTRA_BYTES = 64 * 1024 * 1024  # beside an update: attestations and proofs


def dial(address: str, keys: Keys, purpose: str, me: str) -> socket.socket:
    """A proven connection. PeerError if there is none to be had in time."""
    return dial_purpose(address, keys, Hello(purpose, NO_NUMBER, me), timeout_s=DIAL_S)


class OutgoingLink:
    """To one other server. `send` never waits; what is queued beyond a bound takes the place of the oldest."""

    def __init__(self, address: str, keys: Keys, me: str, bytes_max: int) -> None:
        self._address = address
        self._keys = keys
        self._me = me
        self._bytes_max = bytes_max
        self._queue: deque[bytes] = deque()
        self._bytes = 0
        self._changed = threading.Condition()
        self._closed = False
        self.sent_messages = 0
        self.sent_bytes = 0
        self._thread = threading.Thread(target=self._run, name="holdfast-agreement-link", daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        frame = framing.frame(encode(message))
        with self._changed:
            self._queue.append(frame)
            self._bytes += len(frame)
            while len(self._queue) > 1 and (len(self._queue) > QUEUED_MAX or self._bytes > self._bytes_max):
                self._bytes -= len(self._queue.popleft())
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(DIAL_S + STALL_S)

    def _run(self) -> None:
        while not self._closed:
            try:
                sock = dial(self._address, self._keys, SERVERS, self._me)
            except PeerError:
                with self._changed:
                    self._changed.wait_for(lambda: self._closed, DIAL_AGAIN_S)
                continue
            try:
                self._send_all(sock)
            except (PeerError, OSError):
                pass  # what was under way is said again
            finally:
                sock.close()

    def _send_all(self, sock: socket.socket) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._closed)
                if self._closed:
                    return
                frame = self._queue.popleft()
                self._bytes -= len(frame)
            send(sock, Deadline(STALL_S, SEND_S), [memoryview(frame)])
            self.sent_messages, self.sent_bytes = self.sent_messages + 1, self.sent_bytes + len(frame)


class IncomingLink:
    """An accepted, proven connection. `peer`: the name in its Hello, or that of the connection if it is a client's."""

    def __init__(self, sock: socket.socket, selector: selectors.BaseSelector, peer: str, bytes_max: int) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.peer = peer
        self._selector = selector
        self._bytes_max = bytes_max
        self._input, self._output = bytearray(), bytearray()
        self.received_messages = 0
        self.received_bytes = 0
        selector.register(sock, selectors.EVENT_READ, self)

    def read(self, take: Callable[[str, Message], None]) -> None:
        """What has come. PeerError or OSError when the connection is of no more use."""
        try:
            more = self.sock.recv(READ_BYTES)
        except BLOCKED:
            return
        if not more:
            raise PeerError("the other side closed the connection")
        self._input += more
        self.received_bytes += len(more)
        while (body := framing.take_frame(self._input, self._bytes_max)) is not None:
            self.received_messages += 1
            take(self.peer, decode(bytes(body), KINDS))

    def send(self, message: Message) -> None:
        """PeerError if the other side does not read its answers."""
        if len(self._output) > self._bytes_max:
            raise PeerError("the other side does not read")
        self._output += framing.frame(encode(message))
        self.write()

    def write(self) -> None:
        try:
            while self._output:
                del self._output[: self.sock.send(memoryview(bytes(self._output[:READ_BYTES])))]
        except BLOCKED:
            pass
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._output else 0)
        self._selector.modify(self.sock, events, self)

    def close(self) -> None:
        try:
            self._selector.unregister(self.sock)
        except (KeyError, ValueError):
            pass
        self.sock.close()
