"""A worker's connection to the parameter servers of its run."""

from __future__ import annotations

from holdfast.core.errors import ConfigError
from holdfast.core.options.run import REPLICAS
from holdfast.ledger.port import Ledger
from holdfast.modes import ON_SERVERS
from holdfast.modes.port import Mode
from holdfast.placement.environment import WorkerEnvironment
from holdfast.placement.ledger import open_workers_ledger
from holdfast.servers.asking import Asking
from holdfast.servers.client import ClientSettings, RemoteServers
from holdfast.servers.gathering import Wanted
from holdfast.servers.run_facts import author_of
from holdfast.servers.units_client import RemoteUnits, place_units
from holdfast.servers.units_port import ServerLines
from holdfast.trust.keys import Keys


def check_servers(environment: WorkerEnvironment | None, mode: Mode, *, tables: bool) -> None:
    """ConfigError if the mode needs servers and the run has none, or the other way round.

    `tables`: the model has embedding tables, which are on servers in any mode.

    On several hosts the servers may be on others; whoever looks for them there says so.
    """
    if environment is None or environment.ledger:
        return
    if mode.uses_servers and not environment.servers:
        raise ConfigError(
            f"mode=holdfast.{type(mode).__name__}() trains on parameter servers, and this run has none",
            hint="start some: holdfast run --workers N --servers 3 …; alone, `python train.py` needs none",
        )
    if environment.servers and not mode.uses_servers and not tables:
        raise ConfigError(
            f"--servers starts parameter servers, and mode=holdfast.{type(mode).__name__}() does not use them",
            hint=f"give join {ON_SERVERS}, use a holdfast.EmbeddingTable, or leave out --servers",
        )


def wanted_by(environment: WorkerEnvironment) -> Wanted:
    """With which servers the run begins. On several hosts each has its own, and the ledger knows them."""
    if environment.ledger:
        return Wanted(servers=0, replicas=environment.replicas)
    servers = max(1, environment.servers)
    return Wanted(servers=servers, replicas=environment.replicas or min(REPLICAS, servers))


def reach_servers(environment: WorkerEnvironment, me: str, host: str, keys: Keys) -> ServerLines:
    def ledger() -> Ledger:
        return open_workers_ledger(environment, keys)

    wanted = wanted_by(environment)
    name, incarnation = author_of(me)
    settings = ClientSettings(servers=wanted.servers, replicas=wanted.replicas)
    parameters = RemoteServers(name, incarnation, host, keys, ledger, settings)

    def prepare() -> None:
        opened = ledger()
        try:
            place_units(opened, wanted)
        finally:
            opened.close()

    asking = Asking(me, host, keys, ledger)
    return ServerLines(parameters, RemoteUnits(asking, name, incarnation, prepare=prepare))
