"""Tables on real servers: the same bits as in one process, and nothing lost or doubled while servers are killed."""

from __future__ import annotations

import copy
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import holdfast
from holdfast import tables
from holdfast.core.errors import ConfigError, DivergedError
from holdfast.core.words import KEY_SLICE
from holdfast.tables import server_store
from holdfast.tables.server_store import TableServers, TableServersSettings
from holdfast.tables.stores import LocalStore
from tests.harness.servers.fleet import Fleet

pytestmark = pytest.mark.processes
SHARDS = 3


def servers(fleet: Fleet, worker: str, *, replicas: int = 1, updates_max: int = 0) -> TableServers:
    settings = TableServersSettings(servers=1, replicas=replicas, shards=SHARDS, updates_max=updates_max)
    return TableServers(worker, 1, "h", fleet.keys, fleet.open_ledger, settings)


def made() -> holdfast.EmbeddingTable:
    ends = tables.Expire(rows=60)
    return holdfast.EmbeddingTable(5, optimizer=tables.AdamW(lr=0.05), admit=2, expire=ends, seed=4)


def train(table: holdfast.EmbeddingTable, seed: int) -> bytes:
    draws = torch.Generator().manual_seed(seed)
    ids = torch.randint(-300, 300, (40, 2), generator=draws)
    rows = table(ids)
    (rows - torch.randn(5, generator=draws)).square().sum().backward()
    table.step()
    return rows.detach().numpy().tobytes()


def test_rows_on_servers_have_the_bits_of_rows_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Fleet(2, replicas=2) as fleet:
        there, here = made(), made()
        connection = servers(fleet, "w0", replicas=2)
        there.connect("users", connection.open("users", there.settings))
        here.connect("users", LocalStore(here.settings, shards=SHARDS))
        log = tables.publish(there, str(tmp_path))
        for step in range(12):
            assert train(there, step) == train(here, step), f"step {step}"
            if step % 4 == 3:
                log.write()
        assert isinstance(here.store, LocalStore)
        again = LocalStore(here.settings, shards=SHARDS)
        again.restore([there.store.changes(shard) for shard in range(SHARDS)])
        assert [one.digest() for one in again.states] == [one.digest() for one in here.store.states]
        restored = made()
        restored.connect("users", LocalStore(here.settings, shards=SHARDS))
        assert tables.publish(restored, str(tmp_path)).restore()
        assert isinstance(restored.store, LocalStore)
        assert [one.digest() for one in restored.store.states] == [one.digest() for one in here.store.states]
        other = servers(fleet, "w1", replicas=2)
        filled = made()
        filled.connect("copies", other.open("copies", filled.settings))
        again_there = tables.publish(filled, str(tmp_path))
        monkeypatch.setattr(server_store, "FILL_BYTES", 400)  # a row or two at a time
        for _ in range(2):
            assert again_there.restore()
        for step in range(12, 15):
            assert train(filled, step) == train(there, step), "it goes on in the same way on other servers"
        assert again_there.restore(), "what is further stays as it is"
        assert train(filled, 20) == train(there, 20)
        again_there.write()
        for one in (connection, other):
            one.close()


def test_rows_are_put_back_whatever_the_servers_have_trained_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_store, "FILL_BYTES", 400)  # a row or two at a time
    with Fleet(2, replicas=2) as fleet:
        there, here = made(), made()
        connection = servers(fleet, "w0", replicas=2)
        there.connect("users", connection.open("users", there.settings))
        here.connect("users", LocalStore(here.settings, shards=SHARDS))
        for step in range(8):
            train(there, step)
            train(here, step)
        log = tables.publish(there, str(tmp_path))
        assert "shards" not in there.get_extra_state(), "rows on servers do not travel to workers that join"
        there.hold_rows()
        state = copy.deepcopy(there.get_extra_state())
        there.let_go_of_rows()
        for step in range(20, 25):
            train(there, step)
        log.write()
        history = there.store.history
        there.set_extra_state(state)
        assert there.store.history != history, "numbers of updates mean something else from now on"
        for step in range(8, 14):
            assert train(there, step) == train(here, step), "it goes on as if the other updates had never been"
        log.write()
        restored = made()
        restored.connect("users", LocalStore(here.settings, shards=SHARDS))
        assert tables.publish(restored, str(tmp_path)).restore()
        assert isinstance(restored.store, LocalStore) and isinstance(here.store, LocalStore)
        assert [one.digest() for one in restored.store.states] == [one.digest() for one in here.store.states]
        connection.close()


def test_another_worker_finds_the_table_and_one_with_other_settings_is_told_so() -> None:
    with Fleet(1) as fleet:
        first, second = servers(fleet, "w0"), servers(fleet, "w1")
        table, other = made(), made()
        table.connect("users", first.open("users", table.settings))
        other.connect("users", second.open("users", other.settings))
        for step in range(6):
            train(table, step)
            train(other, step)
        ids = torch.arange(-300, 300)
        with torch.no_grad():
            assert torch.equal(table(ids), other(ids))
        with pytest.raises(ConfigError, match="other settings"):
            second.open("users", holdfast.EmbeddingTable(4).settings)
        with pytest.raises(ConfigError, match="no name for a table"):
            second.open("a/b", table.settings)
        bad = np.full((1, 5), np.inf, dtype=np.float32)
        with pytest.raises(DivergedError, match="users"):
            table.store.push(np.zeros(1, dtype=np.uint64), bad, lr=0.1)
        for one in (first, second):
            one.close()


def test_nothing_acknowledged_is_lost_or_doubled_while_primaries_are_killed() -> None:
    """Every row counts the updates that touched it, in whole numbers."""
    with Fleet(3, replicas=3) as fleet:
        count = holdfast.EmbeddingTable(2, optimizer=tables.SGD(lr=1.0), first=tables.Uniform(0.0))
        connection = servers(fleet, "w0", replicas=3, updates_max=2)
        store = connection.open("counts", count.settings)
        draws, expected, name = np.random.default_rng(0), np.zeros(50), ""
        for number in range(90):
            ids = draws.integers(0, 50, 10)
            np.add.at(expected, ids, 1.0)
            store.push(ids.astype(np.uint64), np.full((10, 2), -1.0, dtype=np.float32), lr=1.0)
            if number in (30, 60):
                name = fleet.configurations()[f"table/counts/{number // 30}"].primary
                fleet.kill(name, announce=number == 30)
            if number == 45:
                fleet.replace(name)
                fleet.wait_for(lambda dead=name: gone(fleet, dead), "the next one leaves a majority")
        store.flush()
        found = store.look_up(np.arange(50, dtype=np.uint64))
        assert np.array_equal(found[:, 0], expected) and np.array_equal(found[:, 1], expected)
        connection.close()


def test_a_table_whose_servers_are_all_lost_is_made_anew_and_is_empty_then() -> None:
    with Fleet(2, replicas=2) as fleet:
        table = made()
        first = servers(fleet, "w0", replicas=2)
        table.connect("users", first.open("users", table.settings))
        train(table, 1)
        state = table.get_extra_state()
        for name in list(fleet.processes):
            fleet.kill(name)
        fleet.wait_for(lambda: not fleet.registered(), "the servers' leases have run out")
        for key in [KEY_SLICE + name for name in fleet.configurations()]:
            fleet.ledger.delete(key)  # as an agent does with what nobody has any more
        second = servers(fleet, "w1", replicas=2)
        opened: list[server_store.ServerStore] = []
        opening = threading.Thread(target=lambda: opened.append(second.open("users", table.settings)))
        opening.start()
        for slot in range(2):
            fleet.start(slot)
        opening.join(60.0)
        (store,) = opened
        assert [store.updates(shard) for shard in range(SHARDS)] == [0] * SHARDS
        again = made()
        again.connect("users", store)
        with pytest.raises(ConfigError, match="its rows are not here"):
            again.set_extra_state(state)
        for one in (first, second):
            one.close()


def gone(fleet: Fleet, name: str) -> bool:
    return all(name not in one.replicas and len(one.replicas) == 3 for one in fleet.configurations().values())
