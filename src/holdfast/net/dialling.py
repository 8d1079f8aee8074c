"""The dialling side of connections. It waits, so it belongs in a thread of its own, with a deadline."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from holdfast.core.errors import PeerError, ProtocolError
from holdfast.core.words import Registration
from holdfast.net.greeting import WORKER, Hello, HelloReader, SharedMemory, send_hello
from holdfast.net.groups import Connection
from holdfast.net.proving import prove
from holdfast.net.sockets import connect, prepare
from holdfast.trust.keys import Keys

CONNECT_S = 5.0  # in all: until the other side has answered our Hello


def address_from(host: str, registration: Registration) -> str:
    """Where a worker of `host` dials this one: workers of one host meet on its unix socket, if it has one."""
    if registration.local and registration.host == host:
        return registration.local
    return registration.address


def dial(
    registration: Registration, host: str, keys: Keys, hello: Hello, *, memory: SharedMemory | None = None
) -> Connection:
    """Connect to a worker for a purpose that is handed over. PeerError if it is not there or not of this run."""
    deadline = time.monotonic() + CONNECT_S
    address = address_from(host, registration)
    mine = memory if address.startswith("unix:") else None
    sock = _dial(address, keys, hello, mine, deadline)
    with _closed_on_failure(sock), closing(HelloReader(sock, (hello.purpose,), mine)) as reader:
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        answer, theirs = reader.read()
        sock.settimeout(None)
        connection = Connection(answer.sender, sock, theirs)
        if answer.number != hello.number:
            connection.close()
            raise ProtocolError("the other side answered for another view")
        return connection


def dial_service(
    registration: Registration, host: str, keys: Keys, hello: Hello, *, memory: SharedMemory | None = None
) -> socket.socket:
    """Connect to a worker for a purpose that is served: what comes next is the purpose's. PeerError as above."""
    address = address_from(host, registration)
    mine = memory if address.startswith("unix:") else None
    return _dial(address, keys, hello, mine, time.monotonic() + CONNECT_S)


def dial_purpose(address: str, keys: Keys, hello: Hello, *, timeout_s: float = CONNECT_S) -> socket.socket:
    """The same with whoever listens at an address and takes such a purpose, registered or not."""
    return _dial(address, keys, hello, None, time.monotonic() + timeout_s)


def _dial(address: str, keys: Keys, hello: Hello, memory: SharedMemory | None, deadline: float) -> socket.socket:
    sock = dial_address(address, keys, WORKER, deadline)
    with _closed_on_failure(sock):
        send_hello(sock, hello, memory)
    return sock


def dial_address(
    address: str,
    keys: Keys,
    kind: bytes,
    deadline: float,
    *,
    prepare: Callable[[socket.socket], None] = prepare,
) -> socket.socket:
    """A connection whose other end has proved that it belongs to the run and is a server of that kind. PeerError."""
    try:
        sock = connect(address, max(deadline - time.monotonic(), 0.001))
    except OSError as error:
        raise PeerError(f"cannot connect: {error}") from error
    with _closed_on_failure(sock):
        prepare(sock)
        return prove(sock, keys, kind, deadline)


@contextmanager
def _closed_on_failure(sock: socket.socket) -> Iterator[None]:
    """Whatever goes wrong at the greeting: the connection is closed, and it is the peer's error."""
    try:
        yield
    except OSError as error:
        sock.close()
        raise PeerError(f"the connection broke at the greeting: {error}") from error
    except BaseException:
        sock.close()
        raise
