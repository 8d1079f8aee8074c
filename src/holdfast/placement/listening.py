"""Where a worker listens for the others of its run: on a unix socket for its own host, on TCP for other hosts."""

from __future__ import annotations

import socket
from pathlib import Path

from holdfast.core.errors import ConfigError
from holdfast.net.addresses import parse_listen
from holdfast.net.sockets import listens_everywhere, open_tcp, open_unix
from holdfast.placement.environment import WorkerEnvironment


def socket_path(environment: WorkerEnvironment) -> Path:
    """Without the host's name, which the directory's owner knows: such a path has 107 bytes at most."""
    return environment.socket_dir / f"{environment.worker.partition('@')[0]}.sock"


def open_sockets(environment: WorkerEnvironment, *, network: bool) -> tuple[list[socket.socket], str, str]:
    """The sockets that a worker listens on, the address for workers of other hosts, and the one for those of this."""
    path, listen = socket_path(environment), environment.listen
    if not environment.host and not listen and not network:
        server, address = open_unix(path)
        return [server], address, ""
    if environment.host and not environment.advertise and listens_everywhere(listen):
        raise ConfigError(
            f"--listen {listen} is no address that other hosts can dial", hint="add --advertise with one that is"
        )
    server, address = open_tcp(listen or "127.0.0.1", environment.advertise)
    if not environment.host:
        return [server], address, ""
    near, local = open_unix(path)
    return [server, near], address, local


def own_address(environment: WorkerEnvironment) -> str:
    """By which the run's other workers find this one, for what listens beside it."""
    if not environment.host:
        return "127.0.0.1"
    if environment.advertise and listens_everywhere(environment.listen):
        return environment.advertise.strip("[]")
    return parse_listen(environment.listen)[0] if environment.listen else "127.0.0.1"
