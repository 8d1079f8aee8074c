"""How an agent tells a parameter server where it belongs: environment variables, as for workers (environment.py)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.placement.environment import ToldByAgent, read_told, variable
from holdfast.placement.server_disks import SERVER_DISKS, SERVER_ROWS, slot_of

SERVER = variable("server")
ALWAYS_EMPTY = -1


@dataclass(frozen=True, kw_only=True)
class ServerEnvironment(ToldByAgent):
    """`start`: how many processes this server's name has had, with this one.

    `started_over`: how often slices had been lost when its disk was begun; ALWAYS_EMPTY: it has none. `table_rows`: so
    many rows of tables stay in its memory; 0: all.
    """

    run_dir: Path
    server: str
    start: int
    socket_dir: Path
    ledger: str
    keys: str
    host: str
    listen: str
    advertise: str
    lease_s: float
    started_over: int
    table_rows: int

    @property
    def directory(self) -> Path | None:
        """Where it keeps its slices' logs; None: in memory."""
        return self.run_dir / SERVER_DISKS / self.server if self.started_over != ALWAYS_EMPTY else None

    @property
    def rows(self) -> Path:
        """Where rows of tables are that are used least: of this slot, whose processes come one after the other."""
        return self.run_dir / SERVER_ROWS / "@".join(part for part in slot_of(self.server) if part)

    @property
    def socket(self) -> Path:
        """Where it listens for processes of this host."""
        return self.socket_dir / f"{self.server.partition('@')[0]}.{self.start}.sock"

    @classmethod
    def from_variables(cls, variables: Mapping[str, str] | None = None) -> ServerEnvironment:
        found = os.environ if variables is None else variables
        return read_told(cls, found, "parameter servers are started by `holdfast run --servers N`")
