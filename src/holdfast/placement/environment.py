"""How an agent tells a worker where it belongs: a few environment variables, read here and nowhere else.

Also the layout of a run directory, which agents, workers and `holdfast status` share:

    RUN_DIR/
      run.json      name, script, arguments, socket directory (see placement/directory.py)
      secret        32 random bytes in hex, mode 0600: proves that a connection belongs to the run
      agent.lock    locked while an agent lives
      ledger/       the embedded ledger's log
      logs/         w3.2.log: standard output and error of each worker
      events/       agent.jsonl, w3.2.jsonl
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TypeVar, get_type_hints

from holdfast.core.errors import ConfigError
from holdfast.core.options.run import WorkerOptions


def variable(setting: str) -> str:
    """The environment variable in which a worker finds a setting."""
    return f"HOLDFAST_{setting.upper()}"


RUN_DIR = variable("run_dir")
WORKER = variable("worker")
LEDGER_SOCKET = "ledger.sock"  # in the socket directory
Told = TypeVar("Told", bound="ToldByAgent")


class ToldByAgent:
    """A base of settings that an agent gives to a process: a variable for each field, and what follows from them."""

    run_dir: Path
    socket_dir: Path

    @property
    def run(self) -> str:
        """The run's name. On several hosts the directory has the host's in its own."""
        return self.run_dir.name.partition("@")[0]

    @property
    def ledger_socket(self) -> Path:
        return self.socket_dir / LEDGER_SOCKET

    def secret(self) -> bytes:
        return bytes.fromhex((self.run_dir / "secret").read_text().strip())

    def to_variables(self) -> dict[str, str]:
        names = [one.name for one in fields(self)]  # type: ignore[arg-type]
        return {variable(name): str(getattr(self, name)) for name in names}


def read_told(cls: type[Told], variables: Mapping[str, str], hint: str) -> Told:
    """What `to_variables` has made of it. ConfigError if one is missing or wrong."""
    types = get_type_hints(cls)
    try:
        return cls(**{one.name: types[one.name](variables[variable(one.name)]) for one in fields(cls)})  # type: ignore[arg-type]
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"the environment variable {error} that an agent sets is missing or wrong", hint=hint
        ) from error


@dataclass(frozen=True, kw_only=True)
class WorkerEnvironment(WorkerOptions, ToldByAgent):
    """What the agent says to a worker: where it is, and its options. A script started by hand has none of it."""

    run_dir: Path
    worker: str
    socket_dir: Path
    checkpoint: str = ""  # CheckpointSettings, encoded; empty: none
    launcher: str = ""  # who started this worker where no agent did: launched.py

    @classmethod
    def from_variables(cls, variables: Mapping[str, str] | None = None) -> WorkerEnvironment | None:
        """None: no agent started this process, and it is a run of one."""
        found = os.environ if variables is None else variables
        if RUN_DIR not in found:
            return None
        hint = f"start workers with `holdfast run`, or unset {RUN_DIR} for a run of one"
        return read_told(cls, found, hint)


def process_variables() -> dict[str, str]:
    """What is set for every process that runs a script, whoever starts it.

    One compute thread, so that none has started before a fork; `join` sets how many the run computes with.
    """
    return {
        "PYTHONUNBUFFERED": "1",
        "PYTHONHASHSEED": "0",  # sets and dicts of strings in the same order in every worker
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
    }
