"""How an agent tells a parameter server where it belongs: environment variables, as for workers (environment.py)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import get_type_hints

from holdfast.core.errors import ConfigError
from holdfast.placement.environment import LEDGER_SOCKET, variable
from holdfast.placement.server_disks import SERVER_DISKS, SERVER_ROWS, slot_of

SERVER = variable("server")
ALWAYS_EMPTY = -1


@dataclass(frozen=True, kw_only=True)
class ServerEnvironment:
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
    def run(self) -> str:
        return self.run_dir.name.partition("@")[0]

    @property
    def ledger_socket(self) -> Path:
        return self.socket_dir / LEDGER_SOCKET

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

    def secret(self) -> bytes:
        return bytes.fromhex((self.run_dir / "secret").read_text().strip())

    def to_variables(self) -> dict[str, str]:
        return {variable(one.name): str(getattr(self, one.name)) for one in fields(self)}

    @classmethod
    def from_variables(cls, variables: Mapping[str, str] | None = None) -> ServerEnvironment:
        found = os.environ if variables is None else variables
        types = get_type_hints(cls)
        try:
            return cls(**{one.name: types[one.name](found[variable(one.name)]) for one in fields(cls)})
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"the environment variable {error} that an agent sets is missing or wrong",
                hint="parameter servers are started by `holdfast run --servers N`",
            ) from error
