"""Moving whole pieces of memory over a socket that waits, where every wait has an end."""

from __future__ import annotations

import socket
import ssl
import time

from holdfast.core.errors import PeerError
from holdfast.net.framing import LENGTH, length_of

TLS_BYTES = 64 * 1024  # at least this much must be taken in `stall_s`


class Deadline:
    """Bounds every wait of a conversation: `stall_s` without a byte, `total_s` in all."""

    def __init__(self, stall_s: float, total_s: float) -> None:
        self._stall_s = stall_s
        self._end = time.monotonic() + total_s

    def arm(self, sock: socket.socket) -> None:
        """Limits the socket's next operation."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("out of time")
        sock.settimeout(min(self._stall_s, left))


def send(sock: socket.socket, deadline: Deadline, views: list[memoryview]) -> None:
    """All of it, in order. OSError if the other side is gone or does not read."""
    # TLS neither gathers nor says how far it is within a call.
    tls = isinstance(sock, ssl.SSLSocket)
    while views:
        deadline.arm(sock)
        views = _rest(views, sock.send(views[0][:TLS_BYTES]) if tls else sock.sendmsg(views))


def receive_into(sock: socket.socket, deadline: Deadline, views: list[memoryview]) -> None:
    """Until all views are full. PeerError if the other side hangs up before, OSError if it says nothing."""
    tls = isinstance(sock, ssl.SSLSocket)
    while views:
        deadline.arm(sock)
        received = sock.recv_into(views[0]) if tls else sock.recvmsg_into(views)[0]
        if not received:
            raise PeerError("the other side closed the connection in the middle of a message")
        views = _rest(views, received)


def receive(sock: socket.socket, deadline: Deadline, length: int) -> bytes:
    data = bytearray(length)
    if length:
        receive_into(sock, deadline, [memoryview(data)])
    return bytes(data)


def receive_frame(sock: socket.socket, deadline: Deadline, bytes_max: int) -> bytes | None:
    """The body of the next frame; None if the other side hung up between two. ProtocolError if it is longer."""
    deadline.arm(sock)
    head = sock.recv(LENGTH.size)
    if not head:
        return None
    head += receive(sock, deadline, LENGTH.size - len(head))
    return receive(sock, deadline, length_of(head, bytes_max))


def _rest(views: list[memoryview], moved: int) -> list[memoryview]:
    for index, view in enumerate(views):
        if moved < len(view):
            return [view[moved:], *views[index + 1 :]]
        moved -= len(view)
    return []
