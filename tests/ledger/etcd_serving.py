"""Real etcd clusters for tests, and what only an administrator or a broken network does to them."""

from __future__ import annotations

import itertools
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from holdfast.agent.hosts.etcd_cluster import EtcdCluster
from holdfast.ledger.etcd import open_etcd
from holdfast.ledger.etcd.ledger import EtcdLedger
from tests.harness import etcd_faults

from .contract import WAIT_S

_numbers = itertools.count(1)


def fresh_run() -> str:
    """A run that nobody has used: tests share clusters, not runs."""
    return f"test-{os.getpid()}-{next(_numbers)}"


class EtcdFactory:
    """A contract.LedgerFactory. Its ledger is a run that is new in a cluster that is not."""

    ttl_granularity_s = 1.0  # with the election timeout of the clusters here; etcd never rounds below
    expiry_slack_s = 2.5  # etcd looks for leases that ran out twice a second, and deletes through Raft

    def __init__(self, url: str, run: str = "", environ: Mapping[str, str] | None = None) -> None:
        self.url = url
        self.run = run or fresh_run()
        self.environ = environ or {}

    def open(self, *, deadline_s: float = WAIT_S) -> EtcdLedger:
        return open_etcd(self.url, self.run, deadline_s=deadline_s, environ=self.environ)


def administer(cluster: EtcdCluster, path: str, **body: Any) -> dict[str, Any]:
    """One of etcd's calls that the ledger never makes, through a member's own socket."""
    answer = etcd_faults.ask(cluster.members[0], path, body, timeout_s=WAIT_S)
    assert answer is not None, f"etcd refused {path}"
    return answer


def compact(cluster: EtcdCluster, revision: int) -> None:
    administer(cluster, "/v3/kv/compaction", revision=revision, physical=True)


def until(condition: Callable[[], bool], what: str, wait_s: float = WAIT_S) -> None:
    deadline = time.monotonic() + wait_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {wait_s:g} s: {what}"
        time.sleep(0.01)


@contextmanager
def all_serving(cluster: EtcdCluster) -> Iterator[None]:
    """Whatever a test does to the members, they all serve again afterwards."""
    try:
        yield
    finally:
        for index, member in enumerate(cluster.members):
            member.signal(signal.SIGCONT)
            if not member.alive:
                cluster.restart(index, wait_s=0)
        cluster.wait_serving()


class Relay:
    """A TCP relay in front of an endpoint. `mute` lets requests through and keeps the answers; `hold` keeps requests
    back, and `release` lets the first of them arrive late."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open = True
        self.mute = False
        self.swallowed = 0  # bytes of answers
        self.hold = False
        self._held: list[tuple[float, socket.socket, bytes]] = []
        self._connections: list[tuple[socket.socket, socket.socket]] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def cut(self) -> None:
        """End all connections."""
        for pair in tuple(self._connections):
            for end in pair:
                try:
                    end.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass

    def release(self, within_s: float) -> None:
        """Let through what was held in the first moments; what came later (that the client gave up) stays behind."""
        assert self._held, "nothing was held"
        first = self._held[0][0]
        for when, server, data in self._held:
            if when <= first + within_s:
                server.sendall(data)
        self._held.clear()

    def close(self) -> None:
        self._open = False
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(WAIT_S)

    def _accept(self) -> None:
        while self._open:
            ready, _, _ = select.select([self._listener], [], [], 0.1) if self._open else ([], [], [])
            if not ready:
                continue
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
            except OSError:
                continue
            self._connections.append((client, server))
            thread = threading.Thread(target=self._carry, args=(client, server), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _carry(self, client: socket.socket, server: socket.socket) -> None:
        with client, server:
            while True:
                try:
                    ready, _, _ = select.select([client, server], [], [])
                    for end in ready:
                        data = end.recv(65536)
                        if not data:
                            return
                        if end is client and self.hold:
                            self._held.append((time.monotonic(), server, data))
                        elif end is client:
                            server.sendall(data)
                        elif self.mute:
                            self.swallowed += len(data)
                        else:
                            client.sendall(data)
                except (OSError, ValueError):
                    return
