"""What the first message between two workers says: what the connection is for, and which memory its sender shares.

A Hello names a purpose that the other side has registered (listener.py) and a number whose meaning is the purpose's: of
a view, of a step, or NO_NUMBER. Between workers of one host it carries a file descriptor of the memory that its sender
shares. `Greeting` is an accepted connection until it has said its Hello; what it may hold meanwhile is one Hello's
worth of bytes and one descriptor.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Container
from dataclasses import dataclass
from typing import Any, Protocol

from holdfast.core.errors import PeerError, ProtocolError
from holdfast.core.words import decode_json
from holdfast.net.proving import Proving
from holdfast.trust.keys import Keys

WORKER = b"worker"  # the kind of server that workers are to each other
HELLO_BYTES = 4096
SENDER_CHARACTERS_MAX = 200
NUMBER_MAX = 1 << 62
NO_NUMBER = 0  # views are counted from 1: a greeting for this one only asks whether we can be reached
SLOTS_MAX = 1 << 20
SLOT_BYTES_MAX = 1 << 48


class SharedMemory(Protocol):
    """Memory behind a file descriptor: so many slots of so many bytes."""

    fd: int
    slots: int
    slot_bytes: int

    def of_peer(self, fd: int, slots: int, slot_bytes: int) -> Any:
        """A peer's memory of the same kind, which owns `fd` from now on. ValueError or OSError if it is not one."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Hello:
    """What each side says first."""

    purpose: str
    number: int
    sender: str

    def encode(self, memory: SharedMemory | None) -> bytes:
        fields: dict[str, Any] = {"purpose": self.purpose, "number": self.number, "from": self.sender}
        if memory is not None:
            fields |= {"slots": memory.slots, "slot_bytes": memory.slot_bytes}
        body = json.dumps(fields).encode()
        assert len(body) <= HELLO_BYTES, len(body)
        return body.ljust(HELLO_BYTES)

    @classmethod
    def decode(cls, data: bytes, purposes: Container[str]) -> tuple[Hello, tuple[int, int] | None]:
        """The Hello, and the shape of the memory that comes with it. ProtocolError for what no worker would say."""
        fields = decode_json(data)
        purpose, sender = fields.get("purpose"), fields.get("from")
        if not isinstance(purpose, str) or purpose not in purposes:
            raise ProtocolError(f"a connection for {str(purpose)[:20]!r}")
        if not isinstance(sender, str) or not 0 < len(sender) <= SENDER_CHARACTERS_MAX:
            raise ProtocolError(f"a connection from {str(sender)[:20]!r}")
        hello = cls(purpose, _whole(fields, "number", NUMBER_MAX), sender)
        if "slots" not in fields:
            return hello, None
        return hello, (_whole(fields, "slots", SLOTS_MAX), _whole(fields, "slot_bytes", SLOT_BYTES_MAX))


def _whole(fields: dict[str, Any], name: str, limit: int) -> int:
    value = fields.get(name)
    if type(value) is not int or not 0 <= value <= limit:
        raise ProtocolError(f"a greeting with the {name} {str(value)[:20]!r}")
    return value


def send_hello(sock: socket.socket, hello: Hello, memory: SharedMemory | None) -> None:
    """At once: it is the first that we send, so a connection that does not take it whole is not worth waiting for."""
    data = hello.encode(memory)
    sent = sock.send(data) if memory is None else socket.send_fds(sock, [data], [memory.fd])
    if sent != len(data):
        raise PeerError("the other side does not read")


class HelloReader:
    """Collects a Hello and the descriptor that comes with it. Whoever does not finish must `close`.

    `memory` is what we share: a peer's is opened as one of the same kind, and closed unread if we share none.
    """

    def __init__(self, sock: socket.socket, purposes: Container[str], memory: SharedMemory | None) -> None:
        self._sock = sock
        self._purposes = purposes
        self._memory = memory
        self._data = bytearray()
        self._fds: list[int] = []

    def read(self) -> tuple[Hello, Any]:
        """The Hello and the peer's memory. Raises what the socket raises when it is not whole yet; then call again."""
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
        hello, shape = Hello.decode(bytes(self._data), self._purposes)
        if shape is None or not self._fds or self._memory is None:
            self.close()
            return hello, None
        try:
            theirs = self._memory.of_peer(self._fds[0], *shape)
        except (ValueError, OSError) as error:
            raise ProtocolError(f"a peer's memory is not what it says: {error}") from error
        self._fds.clear()  # they are the memory's now
        return hello, theirs

    def close(self) -> None:
        for fd in self._fds:
            socket.close(fd)
        self._fds.clear()


class Greeting(Proving):
    """An accepted connection of a worker until it has said its Hello, which is in `hello` then."""

    hello: Hello
    memory: Any = None  # what the peer shares; whoever takes the connection over closes it

    def __init__(
        self,
        sock: socket.socket,
        keys: Keys,
        deadline: float,
        *,
        purposes: Container[str],
        memory: SharedMemory | None = None,
    ) -> None:
        super().__init__(sock, keys, WORKER, deadline)
        self._reader = HelloReader(self.sock, purposes, memory)

    def _finish(self) -> None:
        self.hello, self.memory = self._reader.read()

    def close(self) -> None:
        self._reader.close()
        if self.memory is not None:
            self.memory.close()
        super().close()
