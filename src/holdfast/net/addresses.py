"""Where the processes of a host listen, and the address that others dial: `unix:/path`, or `tcp:host:port` with an IPv6
address in brackets.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from urllib.parse import urlsplit

from holdfast.core.errors import ConfigError, PeerError

_PORTS = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")


def parse_listen(listen: str) -> tuple[str, range]:
    """`HOST`, `HOST:PORT` or `HOST:FIRST-LAST`; the range is empty if any port will do.

    An IPv6 address stands in brackets if ports follow, `[::1]:29500-29599`, and may otherwise.
    """
    host, ports = _split(listen)
    if not ports:
        return host, range(0)
    match = _PORTS.fullmatch(ports)
    if match is None or not host:
        raise ConfigError(
            f"--listen {listen} is neither HOST nor HOST:FIRST-LAST",
            hint="for example --listen 127.0.0.1:29500-29599, or --listen [::1]:29500-29599",
        )
    first = int(match[1])
    last = int(match[2] or match[1])
    if not 1 <= first <= last <= 65535:
        raise ConfigError(
            f"--listen {listen}: {ports} is not a range of ports", hint="ports are from 1 to 65535, the lower first"
        )
    return host, range(first, last + 1)


def _split(listen: str) -> tuple[str, str]:
    if is_ipv6(listen):
        return listen, ""
    if listen.startswith("["):
        host, bracket, rest = listen[1:].partition("]")
        if not bracket or not is_ipv6(host) or (rest and not rest.startswith(":")):
            raise ConfigError(f"--listen {listen} is not an address", hint="for example --listen [::1]:29500-29599")
        return host, rest[1:] or ("" if not rest else "none")
    host, colon, ports = listen.rpartition(":")
    return (host, ports or "none") if colon else (listen, "")


def is_ipv6(text: str) -> bool:
    try:
        ipaddress.IPv6Address(text.partition("%")[0])
    except ValueError:
        return False
    return True


def tcp_address(host: str, port: int) -> str:
    host = host.strip("[]")
    return f"tcp:[{host}]:{port}" if ":" in host else f"tcp:{host}:{port}"


def split_tcp(address: str) -> tuple[str, int]:
    """The host and the port of such an address. PeerError for anything else."""
    kind, _, rest = address.partition(":")
    host, _, port = rest.rpartition(":")
    if kind != "tcp" or not host or not port.isdecimal() or not 0 < int(port) <= 65535:
        raise PeerError(f"{address[:80]!r} is not the address of a worker or an agent")
    return host.strip("[]"), int(port)


def check_listen(listen: str, needed: int) -> None:
    """Fail now, in one sentence, rather than later in every worker."""
    host, ports = parse_listen(listen)
    try:
        family, _, _, _, _ = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(
            f"--listen: {host} is not an address of this host ({error})", hint="try --listen 127.0.0.1"
        ) from error
    free = 0
    refusal = ""
    for port in ports or range(1):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As servers do: a port that only waits out its last connection is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
                probe.listen(1)
            except OSError as error:
                refusal = error.strerror or str(error)
            else:
                free += 1
        if free >= needed:
            return
    if not ports and free:
        return
    if not ports:
        raise ConfigError(f"--listen: cannot listen on {host}: {refusal}", hint="try --listen 127.0.0.1")
    raise ConfigError(
        f"--listen {listen}: {free} of {len(ports)} ports can be used and the run needs {needed}"
        + (f" ({refusal})" if refusal else ""),
        hint="give a wider range or another one; workers, spares and, on several hosts, the agent need a port each",
    )


def address_towards(url: str) -> str:
    """The address of this host on its way to the ledger: where other hosts most likely reach it too.

    Nothing is sent: connecting a datagram socket only asks the kernel for a route.
    """
    for part in urlsplit(url).netloc.split(","):
        host, _, port = part.rpartition(":") if not is_ipv6(part) else (part, "", "")
        if not port.isdigit():
            host, port = part, "2379"
        try:
            found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)
        except OSError:
            continue
        for family, kind, protocol, _, address in found:
            try:
                with socket.socket(family, kind, protocol) as probe:
                    probe.connect(address)
                    return str(probe.getsockname()[0])
            except OSError:
                continue
    raise ConfigError(
        f"there is no way from this host to the ledger at {url}",
        hint="check the addresses, or say where workers listen with --listen HOST",
    )
