"""What a run's servers hold: a model's parameters, and rows of tables. Whoever starts a server gives it these."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from holdfast.servers import serving
from holdfast.servers.server import Kinds
from holdfast.tables.cold import ColdTier
from holdfast.tables.table_slice import TableSlice

TABLE = "table"  # the kind of slices that hold a table's rows
KINDS: Kinds = {**serving.KINDS, TABLE: TableSlice}


def kinds_with_disk(directory: Path, rows_in_memory: int) -> Kinds:
    """A server's: so many rows of tables stay in its memory, and the others are in files in this directory."""
    return {**KINDS, TABLE: partial(TableSlice, ColdTier(directory, rows_in_memory))}
