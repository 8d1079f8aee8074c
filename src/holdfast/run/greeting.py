"""How a connection between workers begins: TLS between hosts, the proof in both directions, then what it is for.

A Hello says whether the connection is for a view's group, for fetching a snapshot, for reading what the host keeps in
memory, and for which view; or for the mean of a step, and of which. Between workers of one host it carries the
sender's arena as a file descriptor.

`Greeting` is the accepting side. It never waits, so that one thread can attend to all who knock; what they may hold
meanwhile is one Hello's worth of bytes and one descriptor each. The dialling side is in dialling.py.
"""

from __future__ import annotations

import json
import selectors
import socket
import ssl
from dataclasses import dataclass
from typing import Any

from holdfast.core.errors import PeerError, ProtocolError
from holdfast.core.words import decode_json
from holdfast.reduce.arena import Arena
from holdfast.trust.handshake import ServerHandshake
from holdfast.trust.keys import Keys

PURPOSE = b"worker"
PURPOSES = ("group", "snapshot", "memory", "mean")
HELLO_BYTES = 4096
SENDER_CHARACTERS_MAX = 200
VIEW_MAX = 1 << 62
NO_VIEW = 0  # views are counted from 1: a greeting for this one only asks whether we can be reached
SLOTS_MAX = 1 << 20
SLOT_BYTES_MAX = 1 << 48
BLOCKED = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


@dataclass(frozen=True)
class Hello:
    """What each side says first."""

    purpose: str
    view: int
    sender: str

    def encode(self, arena: Arena | None) -> bytes:
        fields: dict[str, Any] = {"purpose": self.purpose, "view": self.view, "from": self.sender}
        if arena is not None:
            fields |= {"slots": arena.slots, "slot_bytes": arena.slot_bytes}
        body = json.dumps(fields).encode()
        assert len(body) <= HELLO_BYTES, len(body)
        return body.ljust(HELLO_BYTES)

    @classmethod
    def decode(cls, data: bytes) -> tuple[Hello, tuple[int, int] | None]:
        """The Hello, and the shape of the arena that comes with it. ProtocolError for what no worker would say."""
        fields = decode_json(data)
        purpose, sender = fields.get("purpose"), fields.get("from")
        if purpose not in PURPOSES:
            raise ProtocolError(f"a connection for {str(purpose)[:20]!r}")
        if not isinstance(sender, str) or not 0 < len(sender) <= SENDER_CHARACTERS_MAX:
            raise ProtocolError(f"a connection from {str(sender)[:20]!r}")
        hello = cls(purpose, _whole(fields, "view", VIEW_MAX), sender)
        if "slots" not in fields:
            return hello, None
        return hello, (_whole(fields, "slots", SLOTS_MAX), _whole(fields, "slot_bytes", SLOT_BYTES_MAX))


def _whole(fields: dict[str, Any], name: str, limit: int) -> int:
    value = fields.get(name)
    if type(value) is not int or not 0 <= value <= limit:
        raise ProtocolError(f"a greeting with the {name} {str(value)[:20]!r}")
    return value


def send_hello(sock: socket.socket, hello: Hello, arena: Arena | None) -> None:
    """At once: it is the first that we send, so a connection that does not take it whole is not worth waiting for."""
    data = hello.encode(arena)
    sent = sock.send(data) if arena is None else socket.send_fds(sock, [data], [arena.fd])
    if sent != len(data):
        raise PeerError("the other side does not read")


class HelloReader:
    """Collects a Hello and the descriptor that comes with it. Whoever does not finish must `close`."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._data = bytearray()
        self._fds: list[int] = []

    def read(self) -> tuple[Hello, Arena | None]:
        """Raises what the socket raises when there is not enough yet; then call again."""
        while (missing := HELLO_BYTES - len(self._data)) > 0:
            if self._sock.family == socket.AF_UNIX:
                more, fds, _, _ = socket.recv_fds(self._sock, missing, 2)
                self._fds += fds
            else:
                more = self._sock.recv(missing)
            if not more:
                raise PeerError("the other side closed the connection at the greeting")
            if len(self._fds) > 1:
                raise ProtocolError("more than one file descriptor came with a greeting")
            self._data += more
        hello, shape = Hello.decode(bytes(self._data))
        if shape is None or not self._fds:
            return hello, None
        try:
            arena = Arena(self._fds[0], *shape)
        except (ValueError, OSError) as error:
            raise ProtocolError(f"a peer's memory is not what it says: {error}") from error
        self._fds.clear()  # the arena's now
        return hello, arena

    def close(self) -> None:
        for fd in self._fds:
            socket.close(fd)
        self._fds.clear()


class Greeting:
    """An accepted connection until it has said its Hello. `stage` counts what it has proved."""

    def __init__(self, sock: socket.socket, keys: Keys, deadline: float) -> None:
        sock.setblocking(False)
        context = None if sock.family == socket.AF_UNIX else keys.server_context()
        if context is not None:
            sock = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        self.sock = sock
        self.deadline = deadline
        self.stage = 0
        self.waits_for = selectors.EVENT_READ
        self._handshake = ServerHandshake(keys.secret, PURPOSE)
        self._input = bytearray()
        self._reader = HelloReader(sock)

    def advance(self) -> tuple[Hello, Arena | None] | None:
        """Go on as far as possible. The Hello once it is there; PeerError or OSError for whoever is not welcome."""
        self.waits_for = selectors.EVENT_READ
        try:
            if self.stage == 0:
                if isinstance(self.sock, ssl.SSLSocket):
                    self.sock.do_handshake()
                self.stage = 1
            while self._handshake.need:
                self._shake_hands()
            self.stage = 2
            return self._reader.read()
        except ssl.SSLWantWriteError:
            self.waits_for = selectors.EVENT_WRITE
        except BLOCKED:
            pass
        return None

    def _shake_hands(self) -> None:
        need = self._handshake.need
        while len(self._input) < need:
            more = self.sock.recv(need - len(self._input))
            if not more:
                raise PeerError("the other side closed the connection during the handshake")
            self._input += more
        answer = self._handshake.feed(bytes(self._input))
        self._input.clear()
        if self.sock.send(answer) != len(answer):
            raise PeerError("the other side does not read")

    def close(self) -> None:
        self._reader.close()
        self.sock.close()
