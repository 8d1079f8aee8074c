"""What a run is asked to be: the options of `holdfast run`, checked before anything is started."""

from __future__ import annotations

import re
import shlex
import socket
import sys
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from holdfast.checkpoint.settings import CheckpointSettings
from holdfast.core.config import AUDIT_EVERY_MAX
from holdfast.core.errors import ConfigError
from holdfast.launch.addresses import parse_listen
from holdfast.launch.environment import PATHS, STARTS, WARM
from holdfast.launch.patience import LATE_AFTER_S, check_late, check_patience, late_flags, patience_flags

WORKERS_MAX = 1024
THREADS_MAX = 1024
REPLACE_SLOW_MAX = 0.5  # above, somebody is always slow
RESTARTS_MAX = 1_000_000
LEASE_S_MIN, LEASE_S_MAX = 0.2, 3600.0
OUTAGE_S_MIN, OUTAGE_S_MAX = 10.0, 86400.0
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """One host's part of a run. `script` is a path or, if `module` is true, the name of a module (python -m)."""

    name: str
    script: str
    arguments: tuple[str, ...] = ()
    module: bool = False
    workers: int
    spares: int = 0
    restarts: int = 100
    threads: int = 1
    path: str = "auto"
    listen: str = ""
    lease_s: float = 2.0
    ledger: str = ""  # etcd://...: the run is on several hosts
    host: str = ""  # this host's name among them
    keys: str = ""  # the directory with the run's keys
    advertise: str = ""
    replace_slow: float = 0.3  # of the usual speed: who stays below it is replaced by a spare
    outage_s: float = 300.0  # how long workers of several hosts train on without the ledger
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    stuck_after_s: float = 5.0  # a shard or a batch that stands still for so long hangs; 0: never
    hang_after_s: float = 120.0  # the same elsewhere, and in a worker's first shards; 0: never
    audit: float = 0.0  # the fraction of shards that two workers compute
    audit_every: int = 100  # the workers' states are compared once in so many steps
    late_after_s: float = LATE_AFTER_S  # so long, at least, late shards are waited for; 0: for ever
    start: str = WARM  # see STARTS
    strikes: int = 3  # how often the others may find a slot's worker wrong, before the slot stays empty

    def validate(self) -> None:
        check_name(self.name)
        check_workers(self.workers)
        _check_range("--spares", self.spares, 0, WORKERS_MAX - self.workers)
        _check_range("--restarts", self.restarts, 0, RESTARTS_MAX)
        _check_range("--threads", self.threads, 1, THREADS_MAX)
        if not LEASE_S_MIN <= self.lease_s <= LEASE_S_MAX:
            raise ConfigError(
                f"--lease is {self.lease_s:g} s, but must be from {LEASE_S_MIN:g} to {LEASE_S_MAX:g}",
                hint="2 s suits most runs; a longer lease finds a hung worker later",
            )
        if not 0 <= self.replace_slow <= REPLACE_SLOW_MAX:
            raise ConfigError(
                f"--replace-slow is {self.replace_slow:g}, but must be from 0 to {REPLACE_SLOW_MAX:g}",
                hint="0.3: who stays below three tenths of the usual speed is replaced by a spare; 0: nobody is",
            )
        if self.path not in PATHS:
            raise ConfigError(f"--path is {self.path!r}", hint=f"choose one of {', '.join(PATHS)}")
        if self.start not in STARTS:
            raise ConfigError(f"--start is {self.start!r}", hint=f"choose one of {', '.join(STARTS)}")
        if self.listen:
            parse_listen(self.listen)
            if self.path == "shared-memory":
                raise ConfigError(
                    "--listen is for the network path, and --path asks for shared memory",
                    hint="leave out one of them; workers of one host need no --listen",
                )
        self._validate_hosts()
        self.checkpoint.validate()
        check_patience(self.stuck_after_s, self.hang_after_s)
        if not 0 <= self.audit <= 1:
            raise ConfigError(
                f"--audit is {self.audit:g}", hint="give the fraction of shards, from 0 (none) to 1 (all of them)"
            )
        _check_range("--audit-every", self.audit_every, 0, AUDIT_EVERY_MAX)
        check_late(self.late_after_s)
        _check_range("--strikes", self.strikes, 1, RESTARTS_MAX)
        if not self.module:
            _check_script(self.script)

    def _validate_hosts(self) -> None:
        """What a run on several hosts needs, and what only such a run can have."""
        if not self.ledger:
            for option, value in (("--host", self.host), ("--advertise", self.advertise)):
                if value:
                    raise ConfigError(
                        f"{option} is for a run on several hosts, and this one has no --ledger",
                        hint="name the ledger, --ledger etcd://HOST:2379, or leave the option out",
                    )
            return
        from holdfast.ledger.etcd import check_url  # loads grpc

        check_url(self.ledger)
        if not OUTAGE_S_MIN <= self.outage_s <= OUTAGE_S_MAX:
            raise ConfigError(
                f"--outage is {self.outage_s:g} s, but must be from {OUTAGE_S_MIN:g} to {OUTAGE_S_MAX:g}",
                hint="300 s suits most runs; workers pause when the ledger is away for longer",
            )
        if not NAME.fullmatch(self.host):
            raise ConfigError(
                f"{self.host!r} cannot be the name of a host", hint="give it another name for this run with --host NAME"
            )
        if not self.keys:
            raise ConfigError(
                "a run on several hosts needs keys, so that nobody else can join it",
                hint="make them once with `holdfast keys create DIR`, copy DIR to every host, and give --keys DIR",
            )
        if self.path == "shared-memory":
            raise ConfigError(
                "--path asks for shared memory, which hosts do not have between them",
                hint="leave --path out: workers of one host share memory, and hosts talk over the network",
            )

    def worker_command(self) -> list[str]:
        target = ["-m", self.script] if self.module else [self.script]
        return [sys.executable, "-m", "holdfast.launch.bootstrap", *target, *self.arguments]


def describe(settings: RunSettings, home: Path, socket_dir: Path) -> dict[str, Any]:
    """What run.json says: enough to know the run, and the command that takes it over."""
    return {
        **asdict(settings),
        "socket_dir": str(socket_dir),
        "cwd": str(Path.cwd()),
        "command": _command(settings, home),
    }


def _command(settings: RunSettings, home: Path) -> str:
    defaults = {one.name: one.default for one in fields(RunSettings)}
    words = ["holdfast", "run", "--run", settings.name, "--workers", str(settings.workers), "--dir", str(home)]
    for option, name in (
        ("--spares", "spares"),
        ("--restarts", "restarts"),
        ("--threads", "threads"),
        ("--path", "path"),
        ("--listen", "listen"),
        ("--lease", "lease_s"),
        ("--ledger", "ledger"),
        ("--host", "host"),
        ("--keys", "keys"),
        ("--advertise", "advertise"),
        ("--outage", "outage_s"),
        ("--replace-slow", "replace_slow"),
        ("--audit", "audit"),
        ("--audit-every", "audit_every"),
        ("--strikes", "strikes"),
        ("--start", "start"),
    ):
        value = getattr(settings, name)
        if value != defaults[name]:
            words += [option, str(value)]
    words += settings.checkpoint.flags()
    words += patience_flags(settings.stuck_after_s, settings.hang_after_s)
    words += late_flags(settings.late_after_s)
    return shlex.join([*words, *(["-m"] if settings.module else []), settings.script, *settings.arguments])


def check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot be the name of a run",
            hint="use up to 64 letters, digits, dots, dashes and underscores, starting with a letter or digit",
        )


def host_name() -> str:
    """This machine's name as far as it can stand in a worker's."""
    name = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in socket.gethostname())
    return name.strip("._-")[:64] or "host"


def check_workers(workers: int) -> None:
    _check_range("the number of workers", workers, 1, WORKERS_MAX)


def _check_range(what: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{what} is {value}, but must be from {low} to {high}", hint="see `holdfast run --help`")


def _check_script(script: str) -> None:
    path = Path(script)
    if not path.exists():
        raise ConfigError(
            f"there is no script {script}", hint="check the path; options of holdfast come before the script"
        )
    if not path.is_file():
        raise ConfigError(f"{script} is not a file", hint="give the Python file to run, or a module with `-m module`")
    try:
        with path.open("rb"):
            pass
    except OSError as error:
        raise ConfigError(f"cannot read {script}: {error.strerror}", hint="check its permissions") from error
