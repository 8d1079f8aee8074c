"""The module in one process: like torch's own embedding, with ids of any size, in and out of a state_dict."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import holdfast
from holdfast.core.errors import ConfigError, DivergedError
from holdfast.tables import SGD, Adagrad, Expire
from holdfast.tables.stores import LocalStore, shard_of


def test_it_trains_as_torchs_embedding_does() -> None:
    torch.manual_seed(0)
    table = holdfast.EmbeddingTable(8, optimizer=SGD(lr=0.1), seed=3)
    ids = torch.arange(50)
    twin = torch.nn.EmbeddingBag(50, 8, sparse=True, mode="sum")
    with torch.no_grad():
        twin.weight.copy_(table(ids))
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    for _ in range(10):
        some, target = torch.randint(0, 50, (16, 4)), torch.randn(16, 8)
        optimizer.zero_grad()
        expected = (twin(some) - target).square().mean()
        expected.backward()
        optimizer.step()
        loss = (table(some).sum(dim=1) - target).square().mean()
        loss.backward()
        table.step()
        assert torch.allclose(loss, expected, rtol=1e-5)
    with torch.no_grad():
        assert torch.allclose(table(ids), twin.weight, rtol=1e-5, atol=1e-6)


def test_any_id_has_a_row_and_only_touched_rows_are_kept() -> None:
    table = holdfast.EmbeddingTable(4, optimizer=Adagrad(lr=0.5))
    ids = torch.tensor([[0, -1, 2**62], [-(2**63), 0, 7]])
    before = table(ids)
    assert before.shape == (2, 3, 4) and torch.equal(before[0, 0], before[1, 1])
    unsigned = table(torch.tensor([2**64 - 1], dtype=torch.uint64))
    assert torch.equal(unsigned[0], before[0, 1]), "-1 and 2^64 - 1 are one id"
    before.sum().backward()
    table.step()
    assert isinstance(table.store, LocalStore) and len(table.store.states[0]) == 5
    assert not torch.equal(table(ids)[1, 2], before[1, 2])
    with pytest.raises(ConfigError, match=r"ids are torch\.float32"):
        table(torch.zeros(2))


def test_two_look_ups_of_one_step_are_one_update_and_nothing_is_sent_twice() -> None:
    table = holdfast.EmbeddingTable(2, optimizer=SGD(lr=1.0))
    start = table(torch.tensor([1, 2])).detach()
    (table(torch.tensor([1])).sum() + 2 * table(torch.tensor([1, 2])).sum()).backward()
    table.step()
    table.step()
    after = table(torch.tensor([1, 2])).detach()
    assert torch.allclose(start - after, torch.tensor([[3.0, 3.0], [2.0, 2.0]]))
    assert table.store.updates(0) == 1
    table(torch.tensor([1])).sum().backward()
    table.zero_grad()
    table.step()
    assert table.store.updates(0) == 1


def test_a_frozen_table_gathers_nothing() -> None:
    table = holdfast.EmbeddingTable(2).requires_grad_(False)
    assert not table(torch.tensor([1])).requires_grad
    table.requires_grad_(True)
    with torch.no_grad():
        assert not table(torch.tensor([1])).requires_grad


def test_a_shard_that_is_computed_twice_counts_once() -> None:
    table = holdfast.EmbeddingTable(2, optimizer=SGD(lr=1.0))
    start = table(torch.tensor([1])).detach()
    for shard in (1, 0, 1):
        table.before_shard()
        table(torch.tensor([1])).sum().backward()
        table.after_shard(shard, 0.5)
    table.step()
    assert torch.allclose(start - table(torch.tensor([1])).detach(), torch.ones(1, 2))


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    table = holdfast.EmbeddingTable(2)
    before = table(torch.tensor([5])).detach()
    (table(torch.tensor([5])) * float("inf")).sum().backward()
    with pytest.raises(DivergedError, match="not finite"):
        table.step()
    assert torch.equal(table(torch.tensor([5])).detach(), before) and table.store.updates(0) == 0


def trained(table: holdfast.EmbeddingTable) -> holdfast.EmbeddingTable:
    draws = torch.Generator().manual_seed(1)
    for _ in range(5):
        table(torch.randint(0, 100, (30,), generator=draws)).square().sum().backward()
        table.step()
    return table


def test_its_rows_are_in_the_state_dict(tmp_path: Path) -> None:
    def made() -> holdfast.EmbeddingTable:
        return holdfast.EmbeddingTable(4, optimizer=Adagrad(lr=0.3), admit=2, expire=Expire(updates=50))

    table = trained(made())
    torch.save(table.state_dict(), tmp_path / "table.pt")
    again = made()
    again.load_state_dict(torch.load(tmp_path / "table.pt", weights_only=True))
    assert isinstance(again.store, LocalStore) and isinstance(table.store, LocalStore)
    assert again.store.states[0].digest() == table.store.states[0].digest()
    trained(again), trained(table)
    assert again.store.states[0].digest() == table.store.states[0].digest(), "it goes on in the same way"
    other = holdfast.EmbeddingTable(4, optimizer=SGD())
    with pytest.raises((ConfigError, RuntimeError), match="other settings"):
        other.load_state_dict(table.state_dict())


def test_rows_are_the_same_bits_in_any_number_of_shards_and_on_disk(tmp_path: Path) -> None:
    tables = [holdfast.EmbeddingTable(4) for _ in range(3)]
    tables[1].connect("users", LocalStore(tables[1].settings, shards=3))
    tables[2] = holdfast.EmbeddingTable(4, rows_in_memory=20, disk=tmp_path)
    found = {trained(table)(torch.arange(120)).detach().numpy().tobytes() for table in tables}
    assert len(found) == 1
    with pytest.raises(ConfigError, match="needs rows_in_memory and disk"):
        holdfast.EmbeddingTable(4, rows_in_memory=20)


def test_ids_are_spread_evenly_over_shards() -> None:
    owners = shard_of(np.arange(30_000, dtype=np.uint64), 3)
    assert all(9_500 < count < 10_500 for count in np.bincount(owners.astype(np.int64)))


def test_a_state_whose_rows_are_elsewhere_is_not_taken_for_an_empty_table() -> None:
    """As after the loss of all servers: the dense part comes back from its checkpoint, and the rows must not be new."""

    trained_one, empty, filled = (holdfast.EmbeddingTable(4) for _ in range(3))
    state = trained(trained_one).get_extra_state()
    del state["shards"]  # what a table on servers has in its state
    with pytest.raises(ConfigError, match="its rows are not here"):
        empty.set_extra_state(state)
    filled.store.restore([trained_one.store.changes(0)])
    filled.set_extra_state(state)
    assert filled.get_extra_state()["begun"]
    untrained = holdfast.EmbeddingTable(4).get_extra_state()
    empty.set_extra_state(untrained)


def test_a_copy_looks_up_the_same_rows_and_has_none_in_its_state() -> None:
    model = torch.nn.Sequential(holdfast.EmbeddingTable(4), torch.nn.Linear(4, 1))
    average = torch.optim.swa_utils.AveragedModel(model)
    table = model[0]
    assert isinstance(table, holdfast.EmbeddingTable)
    trained(table)
    ids = torch.arange(30)
    with torch.no_grad():
        assert torch.equal(average.module[0](ids), table(ids))
    state = average.state_dict()
    assert "shards" not in state["module.0._extra_state"]
    average.load_state_dict(state)
    average.update_parameters(model)
