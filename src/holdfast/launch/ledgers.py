"""Which ledger a run has, and how to reach it: etcd for a run on several hosts, else the one that its agent serves."""

from __future__ import annotations

from pathlib import Path

from holdfast.core.errors import HoldfastError
from holdfast.launch.directory import RunDirectory
from holdfast.launch.environment import LEDGER_SOCKET
from holdfast.ledger.embedded import EmbeddedLedger, EmbeddedServer
from holdfast.ledger.port import Ledger


def open_ledger(url: str, run: str, socket: Path, secret: bytes) -> Ledger:
    """A client. `url` is etcd's; empty for the agent's own ledger, which listens on `socket`."""
    if not url:
        return EmbeddedLedger(socket, secret)
    from holdfast.ledger.etcd import open_etcd  # loads grpc, which a run on one host does without

    return open_etcd(url, run)


class AgentLedgers:
    """The agent's clients, one for each of its threads, and the server behind them if the ledger is its own."""

    def __init__(self, directory: RunDirectory, url: str, socket_dir: Path, secret: bytes) -> None:
        socket = socket_dir / LEDGER_SOCKET
        self._server: EmbeddedServer | None = None
        if not url:
            self._server = EmbeddedServer(directory.ledger, socket, secret)
            self._server.start()
        self.main, self.deaths, self.watch, self.presence = (
            open_ledger(url, directory.name, socket, secret) for _ in range(4)
        )

    def serve_again(self) -> HoldfastError | None:
        """Should the server's thread have ended: training goes on without it, but only with it can a view change."""
        if self._server is None or self._server.alive:
            return None
        self._server.stop()
        try:
            self._server.start()
        except HoldfastError as error:
            return error
        return None

    def close(self) -> None:
        for ledger in (self.main, self.deaths, self.watch, self.presence):
            ledger.close()
        if self._server is not None:
            self._server.stop()
