"""A parameter server's process: where it listens, what it says of itself, and how it ends.

Whoever starts such a process (the agent, a test, a benchmark) calls `serve`, which returns after SIGTERM.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from holdfast.core.words import Registration
from holdfast.ledger.port import Ledger
from holdfast.net.sockets import open_tcp, open_unix
from holdfast.servers.account import ServerAccount
from holdfast.servers.parameter_slice import ParameterSlice
from holdfast.servers.server import Kinds, ServerSettings, SliceServer
from holdfast.trust.keys import Keys

PARAMETERS = "parameters"  # the kind of slices that hold a model's parameters
KINDS: Kinds = {PARAMETERS: ParameterSlice}


@dataclass(frozen=True, kw_only=True)
class ServerPlace:
    """Where a server is. `id` is another one for each process: one that lost its memory is another server. With a
    directory (`ServerSettings.directory`) it may keep its id, with the next `start`.

    `socket`: of the unix socket for workers of the same host; None: they use TCP, too.
    """

    id: str
    host: str
    listen: str = "127.0.0.1"
    advertise: str = ""
    socket: Path | None = None
    threads: int = 1  # of torch
    pid_started: int = 0  # when this process did, by the kernel: guards against a reused process id
    start: int = 1  # which process under this id it is: more than 1 only with a directory that keeps what it stored


def build_server(
    place: ServerPlace,
    keys: Keys,
    open_ledger: Callable[[], Ledger],
    settings: ServerSettings | None = None,
    *,
    kinds: Kinds = KINDS,
    on_turn: Callable[[], None] = lambda: None,
    tell: Callable[[str, str, str], None] = lambda name, decision, reason: None,
    report: Callable[[dict[str, Any]], None] = lambda fields: None,
) -> SliceServer:
    """ConfigError if it cannot listen there."""
    tcp, address = open_tcp(place.listen, place.advertise)
    sockets, local = [tcp], ""
    if place.socket is not None:
        unix, local = open_unix(place.socket)
        sockets.append(unix)
    registration = Registration(
        id=place.id,
        host=place.host,
        pid=os.getpid(),
        pid_started=place.pid_started,
        address=address,
        fingerprint="",
        local=local,
    )
    return SliceServer(
        registration,
        sockets,
        keys,
        open_ledger,
        kinds,
        settings,
        start=place.start,
        on_turn=on_turn,
        tell=tell,
        account=ServerAccount(report),
    )


def serve(
    place: ServerPlace,
    keys: Keys,
    open_ledger: Callable[[], Ledger],
    settings: ServerSettings | None = None,
    *,
    kinds: Kinds = KINDS,
    on_turn: Callable[[], None] = lambda: None,
    tell: Callable[[str, str, str], None] = lambda name, decision, reason: None,
    report: Callable[[dict[str, Any]], None] = lambda fields: None,
) -> None:
    """Until SIGTERM. In the main thread of a process of its own."""
    torch.set_num_threads(place.threads)
    warm_up()
    server = build_server(place, keys, open_ledger, settings, kinds=kinds, on_turn=on_turn, tell=tell, report=report)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, frame: server.stop())
    server.run()
    if place.socket is not None:
        place.socket.unlink(missing_ok=True)


def warm_up() -> None:
    """torch loads much with the first step of an optimizer, and a primary must not be silent for so long."""
    parameter = torch.nn.Parameter(torch.zeros(4))
    parameter.grad = torch.zeros(4)
    for optimizer in (torch.optim.SGD([parameter], 0.1, fused=True), torch.optim.Adam([parameter], 0.1, fused=True)):
        optimizer.step()
