"""The parameter servers' part in an agent: the processes of this host, and where slices should be.

Belongs to the agent's main thread, which hands on what it hears.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.agent.ledger_watch import LedgerChange, LedgerContents, News
from holdfast.agent.ledgers import AgentLedgers
from holdfast.agent.report import AgentReporter
from holdfast.agent.servers.server_crew import ServerCrew, ServerDied, fence_server
from holdfast.agent.servers.slice_keeper import SliceKeeper
from holdfast.agent.settings import RunSettings
from holdfast.agent.workers.processes import DeathWatch
from holdfast.core.errors import ProtocolError
from holdfast.core.options.run import MEMORY
from holdfast.core.words import KEY_SERVERS, Registration, host_of
from holdfast.placement.directory import RunDirectory


@dataclass(eq=False)
class Serving:
    _crew: ServerCrew
    _keeper: SliceKeeper
    _deaths: DeathWatch
    _host: str
    _forgets: bool  # what servers have goes with them
    _known: set[str] = field(default_factory=set)  # registrations of this host's
    _heard: bool = False  # what the ledger has: before that, it is not known who serves already

    @classmethod
    def of(
        cls,
        settings: RunSettings,
        directory: RunDirectory,
        socket_dir: Path,
        ledgers: AgentLedgers,
        reporter: AgentReporter,
        post: Callable[[ServerDied], None],
        *,
        listen: str,
    ) -> Serving:
        starts: dict[str, int] = {}
        deaths = DeathWatch(
            ledgers.server_deaths,
            lambda process, *how: post(ServerDied(process, *how)),
            fence=lambda ledger, server: fence_server(ledger, server, starts.get(server, 1)),
            tidy=lambda ledger: None,
        )
        crew = ServerCrew(settings, directory, socket_dir, ledgers.main, deaths, reporter, listen, starts)
        keeper = SliceKeeper(ledgers.main, reporter.tell, reporter.refused, settings.replicas)
        return cls(crew, keeper, deaths, settings.host, settings.durable == MEMORY)

    def heard(self, news: News, now: float) -> None:
        if isinstance(news, LedgerContents):
            for key in sorted(self._known - news.values.keys()):
                self._changed(key, None, now)
            for key, value in news.values.items():
                self._changed(key, value, now, first=not self._heard)
            if not self._heard and not self._keeper.servers and self._forgets:
                self._keeper.forget_slices()  # of servers that had them in memory, and are gone
            self._heard = True
            self._crew.look(now)
        elif isinstance(news, LedgerChange):
            change = news.change
            self._changed(change.key, change.value if change.kind == "put" else None, now)

    def _changed(self, key: str, value: bytes | None, now: float, *, first: bool = False) -> None:
        self._keeper.heard(key, value, now)
        if not key.startswith(KEY_SERVERS) or host_of(key) != self._host:
            return
        server = key[len(KEY_SERVERS) :]
        if value is None:
            self._known.discard(key)
            self._crew.unregistered(server, now)
            return
        self._known.add(key)
        if first:
            with suppress(ProtocolError):
                self._crew.adopt(Registration.decode(value), now)
        self._crew.registered(server)

    def died(self, died: ServerDied, now: float) -> None:
        self._crew.died(died, now)

    def look(self, now: float) -> None:
        if self._heard:
            self._crew.look(now)
            self._keeper.look(now)

    def lost(self, now: float) -> list[str]:
        """Slices that no server has any more, as far as this host's servers are concerned."""
        return self._keeper.lost(now) if self._heard and self._crew.is_wanted and self._forgets else []

    def start_over(self) -> None:
        """With empty servers, to which workers bring the newest checkpoint."""
        self._keeper.forget_slices()
        self._crew.start_over()

    def close(self) -> None:
        self._crew.close()
        self._deaths.close()
