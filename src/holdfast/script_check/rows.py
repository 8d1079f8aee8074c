"""Embedding tables while a script is checked: gradients are gathered as always, and no row changes.

Rows that several workers train depend on whose update comes first, so they are not compared. With rows that stay, all
that is computed from them is.
"""

from __future__ import annotations

from typing import Any

import torch

from holdfast.engine.tables import tables_of
from holdfast.tables.rows.port import Counts, Ids, Values
from holdfast.tables.stores import LocalStore, check_finite


class FrozenRows(LocalStore):
    """In the place of a store: the same rows, which no update changes."""

    def push(
        self, ids: Ids, gradients: Values, *, lr: float, times: Counts | None = None, unit: int | None = None
    ) -> None:
        check_finite(gradients, "the table")


def freeze_rows(model: Any) -> list[str]:
    """Of all tables that are trained; their names."""
    if not isinstance(model, torch.nn.Module):
        return []  # join says what is wrong with it
    trained = {name: table for name, table in tables_of(model).items() if table.is_trained}
    for name, table in trained.items():
        rows = FrozenRows(table.settings)
        if isinstance(table.store, LocalStore):
            rows.states, rows.history = table.store.states, table.store.history
        table.connect(name, rows)
    return list(trained)
