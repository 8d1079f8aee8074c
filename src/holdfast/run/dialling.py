"""The dialling side of connections between workers. It waits, so it belongs in a thread of its own, with a deadline."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

from holdfast.core.errors import PeerError, ProtocolError
from holdfast.core.words import Registration
from holdfast.reduce.arena import Arena
from holdfast.reduce.groups import Connection
from holdfast.run.greeting import NO_VIEW, PURPOSE, Hello, HelloReader, send_hello
from holdfast.run.sockets import connect, prepare
from holdfast.trust.handshake import client_handshake
from holdfast.trust.keys import Keys

CONNECT_S = 5.0  # in all: until the other side has answered our Hello


def address_from(host: str, registration: Registration) -> str:
    """Where a worker of `host` dials this one: workers of one host meet on its unix socket, if it has one."""
    if registration.local and registration.host == host:
        return registration.local
    return registration.address


def dial(registration: Registration, host: str, keys: Keys, hello: Hello, *, arena: Arena | None) -> Connection:
    """Connect to a worker for a view's group. PeerError if it is not there or not of this run."""
    deadline = time.monotonic() + CONNECT_S
    address = address_from(host, registration)
    sock = _dial(address, keys, deadline)
    with _closed_on_failure(sock), closing(HelloReader(sock)) as reader:
        send_hello(sock, hello, arena if address.startswith("unix:") else None)
        sock.settimeout(max(deadline - time.monotonic(), 0.001))
        answer, their_arena = reader.read()
        if answer.view != hello.view:
            raise ProtocolError("the other side answered for another view")
        sock.settimeout(None)
        return Connection(answer.sender, sock, their_arena)


def dial_snapshot(registration: Registration, host: str, keys: Keys, view: int, me: str) -> socket.socket:
    """Connect to a worker to fetch its snapshot of this view."""
    sock = _dial(address_from(host, registration), keys, time.monotonic() + CONNECT_S)
    with _closed_on_failure(sock):
        send_hello(sock, Hello("snapshot", view, me), None)
    return sock


def dial_memory(registration: Registration, host: str, keys: Keys, me: str) -> socket.socket:
    """Connect to a worker to read what its host keeps in memory."""
    sock = _dial(address_from(host, registration), keys, time.monotonic() + CONNECT_S)
    with _closed_on_failure(sock):
        send_hello(sock, Hello("memory", NO_VIEW, me), None)
    return sock


def dial_mean(registration: Registration, host: str, keys: Keys, step: int, me: str) -> socket.socket:
    """Connect to a worker to be sent the mean of a step in which we were left behind."""
    sock = _dial(address_from(host, registration), keys, time.monotonic() + CONNECT_S)
    with _closed_on_failure(sock):
        send_hello(sock, Hello("mean", step, me), None)
    return sock


def _dial(address: str, keys: Keys, deadline: float) -> socket.socket:
    """A connection whose other end has proved that it belongs to the run."""
    try:
        sock = connect(address, CONNECT_S)
    except OSError as error:
        raise PeerError(f"cannot connect: {error}") from error
    with _closed_on_failure(sock):
        prepare(sock)
        context = None if sock.family == socket.AF_UNIX else keys.client_context()
        if context is not None:
            sock.settimeout(max(deadline - time.monotonic(), 0.001))
            sock = context.wrap_socket(sock)  # which closes the connection itself if it fails
    with _closed_on_failure(sock):
        client_handshake(sock, keys.secret, deadline, purpose=PURPOSE)
    return sock


@contextmanager
def _closed_on_failure(sock: socket.socket) -> Iterator[None]:
    """Whatever goes wrong at the greeting: the connection is closed, and it is the peer's error."""
    try:
        yield
    except ssl.SSLCertVerificationError as error:
        sock.close()
        raise ProtocolError(f"the other side's certificate is not of this run: {error.verify_message}") from error
    except OSError as error:
        sock.close()
        raise PeerError(f"the connection broke at the greeting: {error}") from error
    except BaseException:
        sock.close()
        raise
