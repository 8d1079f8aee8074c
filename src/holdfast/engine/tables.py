"""The embedding tables of a model in a run: where their rows are, and what a run can promise of them.

In a run that an agent started, rows are on its parameter servers, whatever the mode of the dense parameters is. Alone,
a script has them in its own process, and in its checkpoints. While tables are trained, what a shard computes depends
on when it is computed: so shards are not computed again to compare their bits. With frozen tables they are.
"""

from __future__ import annotations

from typing import Any

import torch

from holdfast.core.errors import ConfigError
from holdfast.engine.servers import wanted_by
from holdfast.ledger.port import Ledger
from holdfast.placement.environment import WorkerEnvironment
from holdfast.placement.ledger import open_workers_ledger
from holdfast.servers.run_facts import author_of
from holdfast.state.naming import plain_name
from holdfast.tables.module import EmbeddingTable
from holdfast.tables.server_store import TableServers, TableServersSettings
from holdfast.trust.keys import Keys


def tables_of(model: torch.nn.Module) -> dict[str, EmbeddingTable]:
    """By the names that they have in the model; one that is there twice, once."""
    found = model.named_modules()
    return {plain_name(name) or "table": one for name, one in found if isinstance(one, EmbeddingTable)}


def trains_tables(model: torch.nn.Module) -> bool:
    return any(table.is_trained for table in tables_of(model).values())


def without_recomputing(audited: dict[str, Any], model: torch.nn.Module) -> dict[str, Any]:
    """The run's settings of audits, where rows change while shards are computed."""
    return {**audited, "audit": 0.0} if audited and trains_tables(model) else audited


def connect_tables(
    model: torch.nn.Module, environment: WorkerEnvironment | None, me: str, host: str, keys: Keys | None
) -> None:
    """ConfigError if the run has no servers for them."""
    tables = tables_of(model)
    if environment is None or not tables:
        return
    if not environment.servers and not environment.ledger:
        raise ConfigError(
            f"the rows of {next(iter(tables))} are on parameter servers in a run, and this one has none",
            hint="start some: holdfast run --workers N --servers 3 …; alone, `python train.py` needs none",
        )
    assert keys is not None

    def ledger() -> Ledger:
        return open_workers_ledger(environment, keys)

    wanted = wanted_by(environment)
    settings = TableServersSettings(servers=wanted.servers, replicas=wanted.replicas)
    connection = TableServers(*author_of(me), host, keys, ledger, settings)
    for name, table in tables.items():
        table.connect(name, connection.open(name, table.settings))
