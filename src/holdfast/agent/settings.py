"""What a run is asked to be: the options of `holdfast run` and its script, checked before anything is started."""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from holdfast.agent.scripts import check_module, check_script
from holdfast.checkpoint.settings import CheckpointSettings
from holdfast.core.config import PROCESS_GROUP
from holdfast.core.errors import ConfigError
from holdfast.core.options.declaring import check_options, option_of, option_words
from holdfast.core.options.kinds import Whole
from holdfast.core.options.run import WORKERS_MAX, AgentOptions, WorkerOptions
from holdfast.net.addresses import parse_listen
from holdfast.placement.naming import NAME, check_name, host_name


@dataclass(frozen=True, kw_only=True)
class RunSettings(WorkerOptions, AgentOptions):
    """One host's part of a run. `script` is a path or, if `module` is true, the name of a module (python -m)."""

    script: str  # empty where this host only serves
    arguments: tuple[str, ...] = ()
    module: bool = False
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)

    def validate(self) -> None:
        check_name(self.name)
        check_options(self)
        spares = option_of(self, "spares")
        Whole(0, WORKERS_MAX - self.workers).check(spares.flag, self.spares, spares.hint)
        if self.listen:
            parse_listen(self.listen)
            if self.path == "shared-memory" or (self.path == PROCESS_GROUP and not self.ledger):
                way = "shared memory" if self.path == "shared-memory" else "a process group"
                raise ConfigError(
                    f"--listen is for the network path, and --path asks for {way}",
                    hint="leave out one of them; workers of one host need no --listen",
                )
        self._validate_ranks()
        self._validate_servers()
        self._validate_hosts()
        self.checkpoint.validate()
        if self.only_serves and not self.script:
            return
        if self.module:
            check_module(self.script)
        else:
            check_script(self.script)

    @property
    def only_serves(self) -> bool:
        """Whether this host has parameter servers and no workers."""
        return not self.workers

    def _validate_ranks(self) -> None:
        """What goes with groups of ranks, and what does not yet."""
        if self.ranks == 1:
            return
        if self.ranks & (self.ranks - 1):
            raise ConfigError(
                f"--ranks is {self.ranks}", hint="a power of two, so that additions keep their order: 2, 4, 8, ..."
            )
        elsewhere = ("network", PROCESS_GROUP)
        for given, why in (
            ("--ledger" if self.ledger else "", "groups of ranks train on one host"),
            ("--listen" if self.listen else "", "groups of ranks share the host's memory"),
            (f"--path {self.path}" if self.path in elsewhere else "", "groups of ranks share the host's memory"),
            ("--servers" if self.servers else "", "parameter servers take whole gradients"),
            ("--audit" if self.audit else "", "shards of groups are not computed twice"),
            ("--keep-best" if self.checkpoint.keep_best else "", "groups do not agree on recorded values yet"),
            ("--memory" if self.checkpoint.memory else "", "the state of groups is saved to storage only"),
        ):
            if given:
                raise ConfigError(f"{given} does not go with --ranks {self.ranks}: {why}", hint="leave out one of them")

    def _validate_servers(self) -> None:
        """What parameter servers need. On several hosts, how many there are in all is not known here."""
        if self.only_serves:
            self._validate_serving()
        if self.replicas > self.servers and not self.ledger:
            raise ConfigError(
                f"--replicas {self.replicas} needs as many servers, and --servers is {self.servers}",
                hint=f"start more servers, or give --replicas {max(1, self.servers)}",
            )

    def _validate_serving(self) -> None:
        """What a host without workers can be."""
        if not self.servers:
            raise ConfigError(
                "--workers 0 is for a host that only serves, and --servers is 0",
                hint="give --servers 1 or more, or at least one worker",
            )
        if self.spares:
            raise ConfigError(
                f"--spares {self.spares} would wait to replace workers, and this host has none",
                hint="leave out --spares, or give --workers 1 or more",
            )
        if not self.ledger:
            raise ConfigError(
                "a host that only serves is part of a run on several hosts, and this one has no --ledger",
                hint="name the ledger, --ledger etcd://HOST:2379, or give --workers 1 or more",
            )

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

    def at_home(self) -> RunSettings:
        """With this host's name where it takes part in a run on several, and an absolute path to the keys."""
        host = self.host or (host_name() if self.ledger else "")
        return replace(self, host=host, keys=str(Path(self.keys).expanduser().resolve()) if self.keys else "")

    def server_command(self) -> list[str]:
        return [sys.executable, "-m", "holdfast.placement.server_process"]

    def worker_command(self) -> list[str]:
        target = ["-m", self.script] if self.module else [self.script]
        return [sys.executable, "-m", "holdfast.placement.bootstrap", *target, *self.arguments]


def describe(settings: RunSettings, home: Path, socket_dir: Path) -> dict[str, Any]:
    """What run.json says: enough to know the run, and the command that takes it over."""
    return {
        **asdict(settings),
        "socket_dir": str(socket_dir),
        "cwd": str(Path.cwd()),
        "command": _command(settings, home),
    }


def _command(settings: RunSettings, home: Path) -> str:
    words = ["holdfast", "run", *option_words(settings), "--dir", str(home), *settings.checkpoint.words()]
    script = [*(["-m"] if settings.module else []), settings.script] if settings.script else []
    return shlex.join([*words, *script, *settings.arguments])


def check_workers(workers: int) -> None:
    Whole(1, WORKERS_MAX).check("the number of workers", workers, option_of(AgentOptions, "workers").hint)
