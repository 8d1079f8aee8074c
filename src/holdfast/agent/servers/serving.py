"""The parameter servers' part in an agent: the processes of this host, and where slices should be.

Belongs to the agent's main thread, which hands on what it hears.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from holdfast.agent.ledger_watch import LedgerAway, LedgerBack, LedgerChange, LedgerContents, News
from holdfast.agent.ledgers import AgentLedgers, attempt
from holdfast.agent.report import AgentReporter
from holdfast.agent.servers.server_crew import ServerCrew, ServerDied, fence_server, forget_dead_servers
from holdfast.agent.servers.server_hearts import SILENT_S, ServerHearts, ServerLimits
from holdfast.agent.servers.slice_keeper import SliceKeeper
from holdfast.agent.servers.slowness import SlownessJudge
from holdfast.agent.settings import RunSettings
from holdfast.agent.workers.processes import DeathWatch
from holdfast.core.errors import ProtocolError
from holdfast.core.options.run import DISK, MEMORY
from holdfast.core.words import KEY_LEAVING, KEY_SERVERS, KEY_WORKERS, Registration, host_of
from holdfast.ledger.port import Ledger
from holdfast.log.messages import STORES_NO_MORE
from holdfast.placement.directory import RunDirectory

SILENT_BEYOND_LEASE_S = 3.0
DISK_TOLD_S = 60.0  # a server's full disk is told so often


@dataclass(eq=False)
class Serving:
    _crew: ServerCrew
    _keeper: SliceKeeper
    _deaths: DeathWatch
    _hearts: ServerHearts
    _ledger: Ledger
    _refused: Callable[[Any], None]
    _warn: Callable[[str], None]
    _host: str
    _forgets: bool  # what servers have goes with their processes
    _judge: SlownessJudge = field(default_factory=SlownessJudge)
    _known: set[str] = field(default_factory=set)  # keys of servers and workers that the ledger has
    _heard: bool = False  # what the ledger has: before that, it is not known who serves already
    _away: bool = False  # the ledger does not answer: what is known of it is old
    _disk_told_at: dict[str, float] = field(default_factory=dict)  # of a server: its disk takes nothing
    _began_at: int = 0  # how often slices had been lost when this agent last began with its servers

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
            tidy=forget_dead_servers,
        )
        crew = ServerCrew(settings, directory, socket_dir, ledgers.main, deaths, reporter, listen, starts)
        keeper = SliceKeeper(
            ledgers.main,
            reporter.tell,
            reporter.refused,
            settings.replicas,
            settings.host,
            settings.outage_s,
            keeps=settings.durable == DISK,
        )
        silent_s = max(SILENT_S, settings.lease_s + SILENT_BEYOND_LEASE_S)
        limits = ServerLimits(silent_s=silent_s, stuck_s=settings.stuck_after_s or None)
        hearts = ServerHearts(directory.path, limits)
        forgets = settings.durable == MEMORY
        return cls(crew, keeper, deaths, hearts, ledgers.main, reporter.refused, reporter.warn, settings.host, forgets)

    # ---- what happens

    def heard(self, news: News, now: float) -> None:
        if isinstance(news, LedgerContents):
            self._away = False
            for key in sorted(self._known - news.values.keys()):
                self._changed(key, None, now)
            for key, value in news.values.items():
                self._changed(key, value, now, first=not self._heard)
            if not self._heard:
                self._begin(news.values)
            self._heard = True
            self._crew.look(now)
        elif isinstance(news, LedgerChange):
            change = news.change
            self._changed(change.key, change.value if change.kind == "put" else None, now)
        elif isinstance(news, LedgerAway | LedgerBack):
            self._away = isinstance(news, LedgerAway)

    def _begin(self, values: Mapping[str, bytes]) -> None:
        """Slices of servers that had them in memory, and are gone like all workers, are nobody's any more."""
        self._began_at = self._crew.started_over = self._keeper.started_over
        workers = any(key.startswith(KEY_WORKERS) for key in values)
        if not self._keeper.servers and not workers and self._forgets:
            self._keeper.forget_slices()

    def _changed(self, key: str, value: bytes | None, now: float, *, first: bool = False) -> None:
        self._keeper.heard(key, value, now)
        if not key.startswith((KEY_SERVERS, KEY_WORKERS)):
            return
        (self._known.discard if value is None else self._known.add)(key)
        if not key.startswith(KEY_SERVERS):
            return
        server = key[len(KEY_SERVERS) :]
        if value is None:
            self._judge.gone(server)
        if host_of(key) != self._host:
            return
        if value is None:
            self._crew.unregistered(server, now)
            return
        if first:
            with suppress(ProtocolError):
                self._crew.adopt(Registration.decode(value), now)
        self._crew.registered(server)

    def observed(self, event: Mapping[str, Any], now: float) -> None:
        """An event that a server of this host wrote: how long the others take, or that its disk takes nothing."""
        if event["kind"] == "slice" and event.get("decision") == STORES_NO_MORE:
            server = str(event["who"])
            if now - self._disk_told_at.get(server, -math.inf) >= DISK_TOLD_S:
                self._disk_told_at[server] = now
                self._warn(f"{server} stores no updates for now, and none of them is acknowledged: {event['reason']}")
        elif event["kind"] == "serving":
            with suppress(AttributeError, TypeError, ValueError):
                lags_s = {str(server): float(lag_s) for server, lag_s in event.get("lags_s", {}).items()}
                self._judge.measured(str(event["who"]), lags_s, now)

    def died(self, died: ServerDied, now: float) -> None:
        self._crew.died(died, now)

    def look(self, now: float) -> None:
        if not self._heard:
            return
        self._crew.look(now)
        for hung in self._hearts.look(self._crew.living, now):
            self._crew.end_hung(hung)
        for finding in self._judge.look(now):
            self._keeper.found(finding)
        self._keeper.look(now)

    # ---- slices that are lost

    def lost(self, now: float) -> list[str]:
        """Slices that no servers can go on with."""
        return self._keeper.lost(now) if self._heard and not self._away else []

    def start_over(self, step: int) -> None:
        """With slices that workers create anew from the checkpoint of this step."""
        self._keeper.start_over(step)

    def begins_anew(self) -> bool:
        """Whether slices were lost since this was last asked: this host's servers end, and others take their place."""
        if not self._heard or self._keeper.started_over <= self._began_at:
            return False
        self._began_at = self._keeper.started_over
        self._crew.start_over(self._began_at)
        return True

    # ---- the end

    def others_train(self) -> bool:
        """Whether workers of other hosts are still here, which may need this host's servers."""
        ids = (key[len(KEY_WORKERS) :] for key in self._known if key.startswith(KEY_WORKERS))
        return bool(self._crew.living) and any(host_of(worker) != self._host for worker in ids)

    def leave(self) -> None:
        """This host leaves the run, which goes on: its slices are to move to others."""
        for server in self._crew.living:
            attempt(lambda server=server: self._ledger.put(KEY_LEAVING + server, b"{}"), self._refused)  # type: ignore[misc]

    def is_leaving(self) -> bool:
        """Whether slices are still on their way from here to others."""
        return self._keeper.has_slices_on(self._crew.living)

    def close(self) -> None:
        servers = self._crew.living
        self._crew.close()
        for server in servers:
            attempt(lambda server=server: self._ledger.delete(KEY_LEAVING + server), self._refused)  # type: ignore[misc]
        self._hearts.close()
        self._deaths.close()
