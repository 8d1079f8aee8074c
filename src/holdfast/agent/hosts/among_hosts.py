"""An agent's part in a run on several hosts: one mind about the keys, this host's name, and its place in the ring.

Belongs to the agent's main thread; presence.py and ring_watch.py say which threads work for it.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.agent.hosts.host_table import HostTable
from holdfast.agent.hosts.presence import HostPresence, check_keys
from holdfast.agent.hosts.ring_watch import RingNews, RingWatch
from holdfast.agent.ledgers import AgentLedgers, StartPatience
from holdfast.agent.settings import RunSettings
from holdfast.agent.workers.heartbeat_watch import HeartbeatWatch
from holdfast.core.words import KEY_WORKERS
from holdfast.ledger.port import Ledger
from holdfast.net.sockets import open_tcp
from holdfast.placement.directory import RunDirectory
from holdfast.trust.keys import Keys


class AmongHosts:
    """ConfigError if the ledger, the keys, the name or the ports are not as they must be."""

    def __init__(
        self,
        settings: RunSettings,
        directory: RunDirectory,
        ledgers: AgentLedgers,
        patience: StartPatience,
        keys: Keys,
        listen: str,
        heartbeat_watch: HeartbeatWatch,
        report: Callable[[RingNews], None],
    ) -> None:
        patience.ask(lambda: check_keys(ledgers.main, keys.fingerprint, settings.name))
        server, address = open_tcp(listen, settings.advertise, last=True)  # workers take the first ports
        about = {
            "workers": settings.workers,
            "spares": settings.spares,
            "servers": settings.servers,
            "ring": address,
        }
        self._presence = HostPresence(ledgers.presence, settings.host, **about)
        try:
            patience.ask(self._presence.take)
        except BaseException:
            server.close()
            raise
        self.ring = RingWatch(
            settings.host,
            server,
            keys,
            glances=heartbeat_watch.glances,
            idle=lambda: heartbeat_watch.standing_still.idle,
            report=report,
            lease_s=settings.lease_s,
        )
        heartbeat_watch.standing_still.elsewhere = lambda: self.ring.rows
        self._table = HostTable(directory.path)

    def look(self, now: float) -> None:
        self._table.look(self.ring.rows, now)

    def close(self) -> None:
        self.ring.close()
        self._presence.close()


def give_up(ledger: Ledger, workers: tuple[str, ...]) -> None:
    """Registrations only, and no tombstones: who lives after all registers again."""
    for worker in workers:
        ledger.delete(KEY_WORKERS + worker)
