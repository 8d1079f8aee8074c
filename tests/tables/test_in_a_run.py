"""What a run makes of a model's tables, without a run: names, audits, and the sentences for what cannot be."""

from __future__ import annotations

import pytest
import torch

import holdfast
from holdfast.core.errors import ConfigError
from holdfast.engine.tables import connect_tables, tables_of, without_recomputing
from holdfast.modes.table_gradients import TableGradients
from holdfast.tables import SGD
from holdfast.tables.stores import LocalStore

AUDITED = {"audit": 0.01, "audit_every": 100}


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users = holdfast.EmbeddingTable(2, optimizer=SGD(lr=1.0))
        self.towers = torch.nn.ModuleList([holdfast.EmbeddingTable(2), torch.nn.Linear(2, 1)])


def test_tables_have_the_names_that_the_model_gives_them() -> None:
    assert list(tables_of(Model())) == ["users", "towers.0"]
    compiled = torch.nn.Module()
    compiled._orig_mod = Model()  # as torch.compile puts it
    assert list(tables_of(compiled)) == ["users", "towers.0"]
    assert list(tables_of(holdfast.EmbeddingTable(2))) == ["table"]


def test_shards_are_computed_again_to_compare_them_only_while_tables_are_frozen() -> None:
    model = Model()
    assert without_recomputing(AUDITED, model) == {"audit": 0.0, "audit_every": 100}
    for table in tables_of(model).values():
        table.requires_grad_(False)
    assert without_recomputing(AUDITED, model) == AUDITED
    assert without_recomputing({}, Model()) == {}


def test_alone_the_rows_stay_in_this_process() -> None:
    model = Model()
    connect_tables(model, None, "w0.1", "here", None)
    assert isinstance(model.users.store, LocalStore)


def test_gradients_that_a_step_leaves_unsent_are_told() -> None:
    model = Model()
    gradients = TableGradients(model)
    gradients.begin_step()
    gradients.before_shard()
    model.users(torch.tensor([1])).sum().backward()
    gradients.after_shard(0, 0.5)
    with pytest.raises(ConfigError, match="gathered in a step and not sent"):
        gradients.begin_step()
    model.users.step()
    gradients.begin_step()
    gradients.flush()
    assert model.users.store.updates(0) == 1
