"""An agent's part in a run on several hosts: one mind about the keys, this host's name, and its place in the ring.

Belongs to the agent's main thread; presence.py and ring_watch.py say which threads work for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from holdfast.core.words import KEY_WORKERS
from holdfast.launch.directory import RunDirectory
from holdfast.launch.host_table import HostTable
from holdfast.launch.ledgers import AgentLedgers
from holdfast.launch.presence import HostPresence, check_keys
from holdfast.launch.ring_links import listen_for_beats
from holdfast.launch.ring_watch import RingNews, RingWatch
from holdfast.launch.settings import RunSettings
from holdfast.launch.watchman import Glance
from holdfast.ledger.port import Ledger
from holdfast.trust.keys import Keys


class AmongHosts:
    """ConfigError if the ledger, the keys, the name or the ports are not as they must be."""

    def __init__(
        self,
        settings: RunSettings,
        directory: RunDirectory,
        ledgers: AgentLedgers,
        keys: Keys,
        listen: str,
        glances: Callable[[], Mapping[str, Glance]],
        report: Callable[[RingNews], None],
    ) -> None:
        check_keys(ledgers.main, keys.fingerprint, settings.name, settings.ledger)
        server, address = listen_for_beats(listen, settings.advertise)
        about = {"workers": settings.workers, "spares": settings.spares, "ring": address}
        self._presence = HostPresence(ledgers.presence, settings.host, **about)
        try:
            self._presence.take()
        except BaseException:
            server.close()
            raise
        self.ring = RingWatch(settings.host, server, keys, glances=glances, report=report, lease_s=settings.lease_s)
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
