"""Connections between the agents of a run's hosts: beats go one way, from the one that dials to the one that accepts.

They are the run's as all its connections are (net/proving.py), to a kind of server of their own. A frame holds a beat.
Nothing of training passes here, and what a stranger can hold is bounded.

`BeatReader` never waits, so that one thread attends to all. `dial` waits, in a thread of its own. A beat that a
connection does not take at once is not waited for: then the other side has not read for very long, and the connection
is closed.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Iterator, Sequence

from holdfast.core.errors import PeerError
from holdfast.detection.agent_beat import BEAT_BYTES_MAX
from holdfast.net import framing
from holdfast.net.addresses import split_tcp
from holdfast.net.dialling import dial_address
from holdfast.net.proving import BLOCKED
from holdfast.trust.keys import Keys

RING = b"ring"  # the kind of server that agents are to each other
DIAL_S = 3.0
ANSWERS_S = 0.25  # a host that lives answers a connection in this time
ANSWERS_TRIES = 2  # a first packet may be lost, and is sent again only after a second
READ_BYTES = 64 * 1024
UNACKNOWLEDGED_MS = 5000


def dial(address: str, keys: Keys) -> socket.socket:
    """A proven connection that does not block any more. PeerError if there is none to be had in time."""
    sock = dial_address(address, keys, RING, time.monotonic() + DIAL_S, prepare=prepare)
    sock.setblocking(False)
    return sock


def frame(beat: bytes) -> bytes:
    assert len(beat) <= BEAT_BYTES_MAX, len(beat)
    return framing.frame(beat)


def is_open(sock: socket.socket) -> bool:
    """Of a connection on which the other side never says anything."""
    try:
        return bool(sock.recv(1))
    except BLOCKED:
        return True
    except OSError:
        return False


def answers(addresses: Sequence[str]) -> bool:
    """Whether the host behind these addresses does anything with a connection: take it, or refuse it."""
    for _ in range(ANSWERS_TRIES):
        attempts: list[socket.socket] = []
        try:
            for address in addresses:
                attempts += _attempt(address)
            deadline = time.monotonic() + ANSWERS_S
            while attempts and (left_s := deadline - time.monotonic()) > 0:
                for sock in select.select([], attempts, [], left_s)[1]:
                    if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) in _ANSWER:
                        return True
                    attempts.remove(sock)
                    sock.close()
        finally:
            for sock in attempts:
                sock.close()
    return False


_ANSWER = (0, 104, 111)  # connected, reset, refused: all of them said by somebody


def _attempt(address: str) -> Iterator[socket.socket]:
    try:
        host, port = split_tcp(address)
        family, _, _, _, resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, PeerError):
        return
    sock.setblocking(False)
    sock.connect_ex(resolved)
    yield sock


def prepare(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS)


class BeatReader:
    """The accepting end of a proven connection."""

    def __init__(self, sock: socket.socket) -> None:
        prepare(sock)
        self.sock = sock
        self._input = bytearray()
        self.received_bytes = 0

    def read(self) -> list[bytes]:
        """The beats that have come, of one connection no more at a time than would be read of a few.

        PeerError, ProtocolError or OSError when the connection is of no more use.
        """
        frames: list[bytes] = []
        try:
            while not frames:
                more = self.sock.recv(READ_BYTES)
                if not more:
                    raise PeerError("the other side closed the connection")
                self.received_bytes += len(more)
                self._input += more
                while (body := framing.take_frame(self._input, BEAT_BYTES_MAX)) is not None:
                    frames.append(bytes(body))
        except BLOCKED:
            pass
        return frames
