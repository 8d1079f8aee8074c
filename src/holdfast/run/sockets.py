"""The sockets between workers: where they listen, how they are dialled, what is set on them.

In a run on one host a worker listens in one place. In a run on several it listens in two: on a unix socket for the
workers of its own host, which also pass memory, and on TCP for those of others. An address is `unix:/path` or
`tcp:host:port`, with an IPv6 address in brackets.
"""

from __future__ import annotations

import ipaddress
import socket
from pathlib import Path

from holdfast.core.errors import ConfigError, PeerError
from holdfast.launch.addresses import is_ipv6, parse_listen

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


def open_tcp(listen: str, advertise: str = "") -> tuple[socket.socket, str]:
    """Listen on the first free port of `listen`, "HOST" or "HOST:FIRST-LAST"; the address as others dial it.

    `advertise` is the host part that they use, where it is not the one that we listen on.
    """
    host, ports = parse_listen(listen)
    try:
        family, _, _, _, resolved = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except OSError as error:
        raise ConfigError(f"--listen: {host} is not an address of this host", hint="try --listen 127.0.0.1") from error
    refusal = ""
    for port in ports or range(1):  # 0: any free port
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
        f"no free port in {listen}: {refusal}", hint="give --listen a larger range, or only a host of this machine"
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


def tcp_address(host: str, port: int) -> str:
    host = host.strip("[]")
    return f"tcp:[{host}]:{port}" if ":" in host else f"tcp:{host}:{port}"


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
    host, _, port = rest.rpartition(":")
    if kind != "tcp" or not host or not port.isdigit() or int(port) > 65535:
        raise PeerError(f"{address[:80]!r} is not the address of a worker")
    return socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s)


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
