"""Making connections between workers: a listener with a thread of its own, and dialling from short-lived threads.

Every connection proves in both directions that it belongs to the run (ledger/handshake.py), then says what it is
for: a view's group, or fetching a snapshot. On one host it also carries each side's arena as a file descriptor.
What cannot prove itself, says nothing in time or says nonsense costs its own thread for two seconds and no more.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.core.errors import ConfigError, PeerError, ProtocolError
from holdfast.launch.addresses import parse_listen
from holdfast.reduce.arena import Arena
from holdfast.reduce.groups import Connection
from holdfast.trust.handshake import client_handshake, server_handshake

PURPOSE = b"worker"
HELLO_BYTES_MAX = 4096
CONNECT_S = 5.0
CONNECTIONS_MAX = 256
SOCKET_BUFFER_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True)
class Hello:
    """What the dialling side says first."""

    purpose: str  # "group" or "snapshot"
    view: int
    sender: str

    def encode(self, arena: Arena | None) -> bytes:
        fields: dict[str, Any] = {"purpose": self.purpose, "view": self.view, "from": self.sender}
        if arena is not None:
            fields |= {"slots": arena.slots, "slot_bytes": arena.slot_bytes}
        body = json.dumps(fields).encode()
        return body.ljust(HELLO_BYTES_MAX)

    @classmethod
    def decode(cls, data: bytes) -> tuple[Hello, tuple[int, int] | None]:
        try:
            fields = json.loads(data)
            hello = cls(str(fields["purpose"]), int(fields["view"]), str(fields["from"]))
            shape = (int(fields["slots"]), int(fields["slot_bytes"])) if "slots" in fields else None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ProtocolError("a peer's greeting makes no sense") from error
        return hello, shape


class Listener:
    """Accepts connections. `on_group` gets connections for groups, `on_snapshot` serves those for snapshots."""

    def __init__(
        self,
        server: socket.socket,
        secret: bytes,
        me: str,
        *,
        arena: Arena | None,
        on_group: Callable[[int, Connection], None],
        on_snapshot: Callable[[int, socket.socket], None],
    ) -> None:
        self._server = server
        self._secret = secret
        self._me = me
        self._arena = arena
        self._on_group = on_group
        self._on_snapshot = on_snapshot
        self._room = threading.BoundedSemaphore(CONNECTIONS_MAX)
        self._closed = False
        threading.Thread(target=self._accept, name="holdfast-listener", daemon=True).start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._server.accept()
            except OSError:
                time.sleep(0.05)  # closed, or out of descriptors: let others end
                continue
            if not self._room.acquire(blocking=False):
                sock.close()
                continue
            threading.Thread(target=self._greet, args=(sock,), name="holdfast-greeting", daemon=True).start()

    def _greet(self, sock: socket.socket) -> None:
        try:
            prepare(sock)
            deadline = time.monotonic() + 2.0
            server_handshake(sock, self._secret, deadline, purpose=PURPOSE)
            hello, arena = _receive_hello(sock)
            if hello.purpose == "snapshot":
                self._on_snapshot(hello.view, sock)
                sock.close()
            elif hello.purpose == "group":
                _send_hello(sock, Hello("group", hello.view, self._me), self._arena)
                self._on_group(hello.view, Connection(hello.sender, sock, arena))
            else:
                raise ProtocolError(f"a connection for {hello.purpose[:20]!r}")
        except (PeerError, OSError, ValueError):
            sock.close()
        finally:
            self._room.release()

    def close(self) -> None:
        self._closed = True
        with suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


def dial(address: str, secret: bytes, hello: Hello, *, arena: Arena | None) -> Connection:
    """Connect to a worker for a view's group. PeerError if it is not there or not of this run."""
    sock = _dial(address, secret)
    try:
        _send_hello(sock, hello, arena)
        answer, their_arena = _receive_hello(sock)
        if answer.view != hello.view:
            raise ProtocolError("the other side answered for another view")
        sock.settimeout(None)
        return Connection(answer.sender, sock, their_arena)
    except (OSError, ValueError) as error:
        sock.close()
        raise PeerError(f"the connection broke at the greeting: {error}") from error
    except BaseException:
        sock.close()
        raise


def dial_snapshot(address: str, secret: bytes, view: int, me: str) -> socket.socket:
    sock = _dial(address, secret)
    try:
        _send_hello(sock, Hello("snapshot", view, me), None)
    except OSError as error:
        sock.close()
        raise PeerError(f"the connection broke at the greeting: {error}") from error
    return sock


def _dial(address: str, secret: bytes) -> socket.socket:
    try:
        sock = _connect(address)
    except OSError as error:
        raise PeerError(f"cannot connect: {error}") from error
    try:
        prepare(sock)
        client_handshake(sock, secret, time.monotonic() + CONNECT_S, purpose=PURPOSE)
    except BaseException:
        sock.close()
        raise
    return sock


def _connect(address: str) -> socket.socket:
    kind, _, rest = address.partition(":")
    if kind == "unix":
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(CONNECT_S)
        try:
            sock.connect(rest)
        except BaseException:
            sock.close()
            raise
        return sock
    host, _, port = rest.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S)


def prepare(sock: socket.socket) -> None:
    sock.settimeout(CONNECT_S)
    for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
        if sock.family == socket.AF_UNIX:
            sock.setsockopt(socket.SOL_SOCKET, option, SOCKET_BUFFER_BYTES)
    if sock.family != socket.AF_UNIX:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def _send_hello(sock: socket.socket, hello: Hello, arena: Arena | None) -> None:
    data = hello.encode(arena)
    if arena is not None:
        sent = socket.send_fds(sock, [data], [arena.fd])
        sock.sendall(data[sent:])
    else:
        sock.sendall(data)


def _receive_hello(sock: socket.socket) -> tuple[Hello, Arena | None]:
    data = b""
    fds: list[int] = []
    try:
        while len(data) < HELLO_BYTES_MAX:
            if sock.family == socket.AF_UNIX:
                more, new, _, _ = socket.recv_fds(sock, HELLO_BYTES_MAX - len(data), 4)
                fds += new
            else:
                more = sock.recv(HELLO_BYTES_MAX - len(data))
            if not more:
                raise PeerError("the other side closed the connection at the greeting")
            data += more
        hello, shape = Hello.decode(data)
        if shape is None or not fds:
            return hello, None
        arena = Arena(fds[0], *shape)
        del fds[0]  # the arena's now
        return hello, arena
    finally:
        for fd in fds:
            socket.close(fd)


def open_server(socket_path: Path | None, listen: str) -> tuple[socket.socket, str]:
    """A listening socket and its address as others dial it. `listen` is "HOST" or "HOST:FIRST-LAST", or empty."""
    if socket_path is not None and not listen:
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        server.bind(str(socket_path))
        socket_path.chmod(0o600)
        server.listen(128)
        return server, f"unix:{socket_path}"
    host, ports = parse_listen(listen)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in ports or range(1):  # 0: any free port
        server = socket.socket(family, socket.SOCK_STREAM)
        try:
            server.bind((host, port))
        except OSError:
            server.close()
            continue
        server.listen(128)
        return server, f"tcp:{f'[{host}]' if ':' in host else host}:{server.getsockname()[1]}"
    raise ConfigError(f"no free port in {listen}", hint="give --listen a larger range, or only a host")
