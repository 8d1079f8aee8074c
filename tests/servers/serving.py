"""What the port's tests run on: servers in threads of this process over a ledger in memory, and the twin."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from holdfast.ledger.memory import MemoryLedger
from holdfast.servers.client import ClientSettings, RemoteServers
from holdfast.servers.memory import MemoryServers, MemorySlices
from holdfast.servers.port import ParameterServers
from holdfast.servers.server import ServerSettings, SliceServer
from holdfast.servers.serving import ServerPlace, build_server
from holdfast.trust.keys import Keys

Open = Callable[[str], ParameterServers]  # a worker's connection, by the worker's name


@contextmanager
def in_memory(slices: int) -> Iterator[Open]:
    shared = MemorySlices(slices)
    yield lambda worker: MemoryServers(shared, worker)


@contextmanager
def in_threads(
    slices: int,
    *,
    servers: int = 3,
    replicas: int = 3,
    keys: Keys | None = None,
    settings: ServerSettings | None = None,
    host: str = "h",
    ledger: MemoryLedger | None = None,
    running: list[SliceServer] | None = None,
    sockets: Path | None = None,
) -> Iterator[Open]:
    """With `keys` that have certificates everything goes through TLS. `host`: the workers'; the servers' is h.

    `running`: the servers are put in there. `sockets`: a directory for their unix sockets, by which workers of their
    host share memory with them; None: they have none.
    """
    keys, ledger = keys or Keys.from_secret(os.urandom(32)), ledger or MemoryLedger()
    running = running if running is not None else []
    with ExitStack() as closing:
        for slot in range(servers):
            place = ServerPlace(id=f"s{slot}.1", host="h", socket=sockets / f"s{slot}.sock" if sockets else None)
            server = build_server(place, keys, ledger.another, settings)
            running.append(server)
            thread = threading.Thread(target=server.run, name=f"server-{server.me}", daemon=True)
            thread.start()
            closing.callback(thread.join, 10.0)
        for server in running:
            closing.callback(server.stop)

        def connect(worker: str) -> RemoteServers:
            asked = ClientSettings(servers=servers, replicas=replicas, slices=slices, patience_s=30.0)
            client = RemoteServers(worker, 1, host, keys, ledger.another, asked)
            closing.callback(client.close)
            return client

        yield connect
