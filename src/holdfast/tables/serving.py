"""What a run's servers hold: a model's parameters, and rows of tables. Whoever starts a server gives it these."""

from __future__ import annotations

from holdfast.servers import serving
from holdfast.servers.server import Kinds
from holdfast.tables.table_slice import TableSlice

TABLE = "table"  # the kind of slices that hold a table's rows
KINDS: Kinds = {**serving.KINDS, TABLE: TableSlice}
