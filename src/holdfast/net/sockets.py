"""The sockets between processes: where they listen, how they are dialled, what is set on them.

In a run on one host a worker listens in one place. In a run on several it listens in two: on a unix socket for the
workers of its own host, which also pass memory, and on TCP for those of others. What addresses look like: addresses.py.
"""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path

from holdfast.core.errors import ConfigError
from holdfast.net.addresses import is_ipv6, parse_listen, split_tcp, tcp_address

BACKLOG = 1024  # strangers who knock all at once must not make an honest peer's first packet be dropped
UNIX_BUFFER_BYTES = 4 * 1024 * 1024
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_COUNT = 1, 1, 3


def open_unix(path: Path) -> tuple[socket.socket, str]:
    """A socket that only this user can open, and its address."""
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        server.bind(str(path))
        path.chmod(0o600)  # before listen: until then every connection is refused
        server.listen(BACKLOG)
    except OSError as error:
        server.close()
        raise ConfigError(
            f"cannot listen on {path}: {error.strerror or error}", hint="its directory must exist and be writable"
        ) from error
    return server, f"unix:{path}"


def open_tcp(listen: str, advertise: str = "", *, last: bool = False) -> tuple[socket.socket, str]:
    """Listen on the first free port of `listen`, "HOST" or "HOST:FIRST-LAST", or on the last; the address to dial.

    `advertise` is the host part that others use, where it is not the one that we listen on.
    """
    host, ports = parse_listen(listen)
    try:
        family, _, _, _, resolved = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise ConfigError(f"--listen: {host} is not an address of this host", hint="try --listen 127.0.0.1") from error
    refusal = ""
    for port in (ports[::-1] if last else ports) or range(1):  # 0: any free port
        server = socket.socket(family, socket.SOCK_STREAM)
        try:
            # A port that only waits out the last connections of a dead worker is free.
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind((resolved[0], port, *resolved[2:]))
            server.listen(BACKLOG)
        except OSError as error:
            server.close()
            refusal = error.strerror or str(error)
            continue
        return server, tcp_address(advertise or _dialable(host), server.getsockname()[1])
    raise ConfigError(
        f"no free port in {listen}: {refusal}",
        hint="give --listen a wider range: workers, spares and, on several hosts, the agent need a port each",
    )


def listens_everywhere(listen: str) -> bool:
    """Whether this is no address that anyone else could dial."""
    try:
        return ipaddress.ip_address(parse_listen(listen)[0]).is_unspecified
    except ValueError:
        return False


def _dialable(host: str) -> str:
    """Who listens on all interfaces is reached, by those of its own host, on loopback."""
    if listens_everywhere(host):
        return "::1" if is_ipv6(host) else "127.0.0.1"
    return host


def connect(address: str, timeout_s: float) -> socket.socket:
    """Raises OSError if nobody listens there in time, PeerError if it is no address."""
    kind, _, rest = address.partition(":")
    if kind == "unix":
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.settimeout(timeout_s)
        try:
            sock.connect(rest)
        except BaseException:
            sock.close()
            raise
        return sock
    return socket.create_connection(split_tcp(address), timeout=timeout_s)


def prepare(sock: socket.socket) -> None:
    """Set on every connection between workers, by both ends."""
    if sock.family == socket.AF_UNIX:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, UNIX_BUFFER_BYTES)
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # A host that lost power sends no good-bye: have the kernel ask while nothing else is under way. Not
    # TCP_USER_TIMEOUT, which would also give up a peer whose host answers while its process is too busy to read.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_COUNT)
