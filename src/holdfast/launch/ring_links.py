"""Connections between the agents of a run's hosts: beats go one way, from the one that dials to the one that accepts.

They are the run's as all its connections are: TLS with the run's certificates, then the proof in both directions,
with a purpose of their own. Frames are two bytes of length and a beat. Nothing of training passes here, and what a
stranger can hold is bounded.

`Incoming` never waits, so that one thread attends to all. `dial` waits, in a thread of its own. A beat that a
connection does not take at once is not waited for: then the other side has not read for very long, and the connection
is closed.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
import time
from collections.abc import Iterator, Sequence

from holdfast.core.errors import ConfigError, PeerError, ProtocolError
from holdfast.detection.tidings import BEAT_BYTES_MAX
from holdfast.launch.addresses import is_ipv6, parse_listen
from holdfast.trust.handshake import ServerHandshake, client_handshake
from holdfast.trust.keys import Keys

PURPOSE = b"ring"
BACKLOG = 64
DIAL_S = 3.0
ANSWERS_S = 0.25  # a host that lives answers a connection in this time
ANSWERS_TRIES = 2  # a first packet may be lost, and is sent again only after a second
READ_BYTES = 64 * 1024
UNACKNOWLEDGED_MS = 5000
_LENGTH = struct.Struct("!H")
_BLOCKED = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


def listen_for_beats(listen: str, advertise: str) -> tuple[socket.socket, str]:
    """Listen on the last free port of `listen`, as workers do on the first; and the address that others dial."""
    host, ports = parse_listen(listen)
    refusal = ""
    for port in reversed(ports or range(1)):
        try:
            family, _, _, _, resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            server = socket.socket(family, socket.SOCK_STREAM)
        except OSError as error:
            refusal = str(error)
            continue
        try:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(resolved)
            server.listen(BACKLOG)
            server.setblocking(False)
        except OSError as error:
            server.close()
            refusal = error.strerror or str(error)
            continue
        name = (advertise or host).strip("[]")
        return server, f"[{name}]:{server.getsockname()[1]}" if is_ipv6(name) else f"{name}:{server.getsockname()[1]}"
    raise ConfigError(
        f"the agent finds no free port in {listen}: {refusal}",
        hint="give --listen a wider range: the agent needs a port beside those of its workers",
    )


def split_address(address: str) -> tuple[str, int]:
    host, _, port = address.removeprefix("tcp:").rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) <= 65535:
        raise PeerError(f"{address[:80]!r} is not an address")
    return host.strip("[]"), int(port)


def dial(address: str, keys: Keys) -> socket.socket:
    """A proven connection that does not block any more. OSError or PeerError if there is none to be had in time."""
    deadline = time.monotonic() + DIAL_S
    sock = socket.create_connection(split_address(address), timeout=DIAL_S)
    try:
        _prepare(sock)
        context = keys.client_context()
        if context is not None:
            sock = context.wrap_socket(sock)
        client_handshake(sock, keys.secret, deadline, purpose=PURPOSE)
        sock.setblocking(False)
    except BaseException:
        sock.close()
        raise
    return sock


def frame(beat: bytes) -> bytes:
    assert len(beat) <= BEAT_BYTES_MAX, len(beat)
    return _LENGTH.pack(len(beat)) + beat


def is_open(sock: socket.socket) -> bool:
    """Of a connection on which the other side never says anything."""
    try:
        return bool(sock.recv(1))
    except _BLOCKED:
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
        host, port = split_address(address)
        family, _, _, _, resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, PeerError):
        return
    sock.setblocking(False)
    sock.connect_ex(resolved)
    yield sock


def _prepare(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_MS)


class Incoming:
    """An accepted connection. `proven` once it has shown that it belongs to the run."""

    def __init__(self, sock: socket.socket, keys: Keys, deadline: float) -> None:
        sock.setblocking(False)
        _prepare(sock)
        context = keys.server_context()
        self._sock = (
            sock if context is None else context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        )
        self._greeted = context is None
        self._handshake = ServerHandshake(keys.secret, PURPOSE)
        self._input = bytearray()
        self.deadline = deadline
        self.received_bytes = 0

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def proven(self) -> bool:
        return not self._handshake.need

    def read(self) -> list[bytes]:
        """The beats that have come. PeerError, ProtocolError or OSError when the connection is of no more use."""
        try:
            if isinstance(self._sock, ssl.SSLSocket) and not self._greeted:
                self._sock.do_handshake()
                self._greeted = True
            while not self.proven:
                self._shake_hands()
            return self._frames()
        except _BLOCKED:
            return []

    def _shake_hands(self) -> None:
        need = self._handshake.need
        while len(self._input) < need:
            more = self._sock.recv(need - len(self._input))
            if not more:
                raise PeerError("the other side closed the connection during the handshake")
            self._input += more
        answer = self._handshake.feed(bytes(self._input))
        self._input.clear()
        if self._sock.send(answer) != len(answer):
            raise PeerError("the other side does not read")

    def _frames(self) -> list[bytes]:
        """All that is there, but of one connection no more at a time than would be read of a few beats."""
        frames: list[bytes] = []
        try:
            while not frames:
                more = self._sock.recv(READ_BYTES)
                if not more:
                    raise PeerError("the other side closed the connection")
                self.received_bytes += len(more)
                self._input += more
                frames += self._take()
        except _BLOCKED:
            pass
        return frames

    def _take(self) -> Iterator[bytes]:
        while len(self._input) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._input)
            if not 0 < length <= BEAT_BYTES_MAX:
                raise ProtocolError(f"a beat of {length} bytes")
            end = _LENGTH.size + length
            if len(self._input) < end:
                return
            yield bytes(self._input[_LENGTH.size : end])
            del self._input[:end]

    def close(self) -> None:
        self._sock.close()
