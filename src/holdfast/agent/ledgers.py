"""The agent's way to the ledger: a client for each of its threads, and the server behind them where it is its own."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from holdfast.core.errors import ConfigError, HoldfastError, LedgerError, LedgerUnavailable
from holdfast.ledger.embedded import EmbeddedServer
from holdfast.placement.directory import RunDirectory
from holdfast.placement.environment import LEDGER_SOCKET
from holdfast.placement.ledger import open_ledger

START_S = 30.0
_PAUSE_S = 0.2

Answer = TypeVar("Answer")


def attempt(call: Callable[[], object], refused: Callable[[LedgerError], None]) -> None:
    """What may fail without harm: the ledger will be told again, or shows it in another way."""
    try:
        call()
    except LedgerError as error:
        refused(error)


class StartPatience:
    """An agent may start before its ledger does, or while the ledger's disk is busy: it waits, and says so.

    What is asked must be safe to ask again. Only for the start: a run that goes on does not wait for its ledger.
    """

    def __init__(self, url: str, say: Callable[[str], None], *, patience_s: float = START_S) -> None:
        self._url = url
        self._say = say
        self._patience_s = patience_s
        self._deadline: float | None = None  # from the first silence on

    def ask(self, call: Callable[[], Answer]) -> Answer:
        """What `call` returns. ConfigError when the ledger has not answered for too long."""
        while True:
            try:
                return call()
            except LedgerUnavailable as error:
                if not self._url:
                    raise  # the agent's own: waiting does not help
                self._wait(error)

    def _wait(self, error: LedgerUnavailable) -> None:
        now = time.monotonic()
        if self._deadline is None:
            self._deadline = now + self._patience_s
            self._say(f"{error.message}; waiting up to {self._patience_s:g} s for it, Ctrl-C ends the wait")
        elif now >= self._deadline:
            raise ConfigError(
                f"the ledger at {self._url} does not answer: {error.message}",
                hint="see `holdfast ledger status`, or start one to try things out with `holdfast ledger start`",
            ) from error
        time.sleep(_PAUSE_S)


class AgentLedgers:
    """The agent's clients, one for each of its threads, and the server behind them if the ledger is its own."""

    def __init__(self, directory: RunDirectory, url: str, socket_dir: Path, secret: bytes) -> None:
        socket = socket_dir / LEDGER_SOCKET
        self._server: EmbeddedServer | None = None
        if not url:
            self._server = EmbeddedServer(directory.ledger, socket, secret)
            self._server.start()
        self.main, self.deaths, self.watch, self.presence, self.server_deaths = (
            open_ledger(url, directory.name, socket, secret) for _ in range(5)
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
        for ledger in (self.main, self.deaths, self.watch, self.presence, self.server_deaths):
            ledger.close()
        if self._server is not None:
            self._server.stop()
