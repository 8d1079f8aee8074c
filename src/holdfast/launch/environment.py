"""How an agent tells a worker where it belongs: a few environment variables, read here and nowhere else.

Also the layout of a run directory, which agents, workers and `holdfast status` share:

    RUN_DIR/
      run.json      name, script, arguments, socket directory (see launch/directory.py)
      secret        32 random bytes in hex, mode 0600: proves that a connection belongs to the run
      agent.lock    locked while an agent lives
      ledger/       the embedded ledger's log
      logs/         w3.2.log: standard output and error of each worker
      events/       agent.jsonl, w3.2.jsonl
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast.core.errors import ConfigError

RUN_DIR = "HOLDFAST_RUN_DIR"
WORKER = "HOLDFAST_WORKER"
SOCKET_DIR = "HOLDFAST_SOCKET_DIR"
PATH = "HOLDFAST_PATH"
LISTEN = "HOLDFAST_LISTEN"
THREADS = "HOLDFAST_THREADS"
LEASE_S = "HOLDFAST_LEASE_S"
LEDGER = "HOLDFAST_LEDGER"
HOST = "HOLDFAST_HOST"
KEYS = "HOLDFAST_KEYS"
ADVERTISE = "HOLDFAST_ADVERTISE"
OUTAGE_S = "HOLDFAST_OUTAGE_S"
CHECKPOINT = "HOLDFAST_CHECKPOINT"
AUDIT = "HOLDFAST_AUDIT"
AUDIT_EVERY = "HOLDFAST_AUDIT_EVERY"
LATE_AFTER_S = "HOLDFAST_LATE_AFTER_S"
LEDGER_SOCKET = "ledger.sock"  # in the socket directory
WARM, COLD = STARTS = ("warm", "cold")  # forked from a process that has imported what they need, or one by one
PATHS = ("auto", "shared-memory", "network")


@dataclass(frozen=True, kw_only=True)
class WorkerEnvironment:
    """What the agent says to a worker. A script started by hand has none and is a run of one."""

    run_dir: Path
    worker: str
    socket_dir: Path
    path: str = "auto"  # how gradients travel: see PATHS
    listen: str = ""  # "", "HOST" or "HOST:FIRST-LAST": listen on TCP rather than on a unix socket
    threads: int = 1
    lease_s: float = 2.0
    ledger: str = ""  # "etcd://..."; empty: the one that the agent serves
    host: str = ""  # this host's name in a run on several; empty in a run on one
    keys: str = ""  # the directory with the run's keys; empty: only the secret in the run directory
    advertise: str = ""  # the address that workers of other hosts dial, where it is not the one that we listen on
    outage_s: float = 0.0  # how long to train on without the ledger; 0: for ever
    checkpoint: str = ""  # CheckpointSettings, encoded; empty: none
    audit: float = 0.0  # the fraction of shards that two workers compute
    audit_every: int = 0  # the members' states are compared once in so many steps; 0: never
    late_after_s: float = 0.0  # how long shards that are late are waited for, at least; 0: for ever

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
        return {
            RUN_DIR: str(self.run_dir),
            WORKER: self.worker,
            SOCKET_DIR: str(self.socket_dir),
            PATH: self.path,
            LISTEN: self.listen,
            THREADS: str(self.threads),
            LEASE_S: repr(self.lease_s),
            LEDGER: self.ledger,
            HOST: self.host,
            KEYS: self.keys,
            ADVERTISE: self.advertise,
            OUTAGE_S: repr(self.outage_s),
            CHECKPOINT: self.checkpoint,
            AUDIT: repr(self.audit),
            AUDIT_EVERY: str(self.audit_every),
            LATE_AFTER_S: repr(self.late_after_s),
        }

    @classmethod
    def from_variables(cls, variables: Mapping[str, str] | None = None) -> WorkerEnvironment | None:
        found = os.environ if variables is None else variables
        if RUN_DIR not in found:
            return None
        try:
            return cls(
                run_dir=Path(found[RUN_DIR]),
                worker=found[WORKER],
                socket_dir=Path(found[SOCKET_DIR]),
                path=found.get(PATH, "auto"),
                listen=found.get(LISTEN, ""),
                threads=int(found.get(THREADS, "1")),
                lease_s=float(found.get(LEASE_S, "2.0")),
                ledger=found.get(LEDGER, ""),
                host=found.get(HOST, ""),
                keys=found.get(KEYS, ""),
                advertise=found.get(ADVERTISE, ""),
                outage_s=float(found.get(OUTAGE_S, "0.0")),
                checkpoint=found.get(CHECKPOINT, ""),
                audit=float(found.get(AUDIT, "0.0")),
                audit_every=int(found.get(AUDIT_EVERY, "0")),
                late_after_s=float(found.get(LATE_AFTER_S, "0.0")),
            )
        except (KeyError, ValueError) as error:
            raise ConfigError(
                f"the environment variable {error} that an agent sets is missing or wrong",
                hint=f"start workers with `holdfast run`, or unset {RUN_DIR} for a run of one",
            ) from error
