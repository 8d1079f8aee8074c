"""What a drill is asked to do: read from a small TOML file, from flags, or both, and checked before anything starts."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from holdfast.core.durations import parse_duration
from holdfast.core.errors import ConfigError
from holdfast.core.options.kinds import parse_whole
from holdfast.core.options.run import AUTO, SERVERS_MAX, WORKERS_MAX

if sys.version_info >= (3, 11):
    import tomllib
else:  # the same reader, from before it was part of Python
    import tomli as tomllib

CORRUPTIBLE = ("gradient", "parameter", "optimizer")
FOR_S_MAX = 24 * 3600.0
PERIOD_S_MIN = 0.2
STOPS_MAX = 1000
HOSTS_MAX = 16
TIMES_MIN, TIMES_MAX = 1.1, 100.0
_SLOW = re.compile(r"(\d+):(\d+(?:\.\d+)?)x?")


@dataclass(frozen=True)
class SlowWorker:
    """One worker that is so many times slower than it could be."""

    worker: int
    times: float


@dataclass(frozen=True, kw_only=True)
class DrillPlan:
    """Zero, none and empty mean: not this fault."""

    workers: int = 4
    spares: int = 2  # a worker takes seconds to start: one would be missing whenever two die in that time
    ranks: int = 1  # each worker is a group of so many, any of which may be killed
    hosts: int = 1
    for_s: float = 60.0
    seed: int = 0
    kill_every_s: float = 0.0
    servers: int = 0  # parameter servers, for a script that trains on them
    kill_servers_every_s: float = 0.0
    stop: int = 0
    slow: tuple[SlowWorker, ...] = ()
    partition_s: float = 0.0
    ledger_down_s: float = 0.0
    storage_down_s: float = 0.0
    disk_full_s: float = 0.0
    corrupt: str = ""
    path: str = AUTO  # how gradients travel in both runs
    save_every: str = "5s"
    keep_best: str = ""  # by a recorded metric, as in "val_loss:min": both runs save it, and must save the same

    @property
    def kinds(self) -> tuple[str, ...]:
        """The faults that it asks for, by the names of the catalogue."""
        asked = {
            "kill": self.kill_every_s,
            "kill-server": self.kill_servers_every_s,
            "stop": self.stop,
            "slow": self.slow,
            "partition": self.partition_s,
            "ledger-down": self.ledger_down_s,
            "storage-down": self.storage_down_s,
            "disk-full": self.disk_full_s,
            "corrupt": self.corrupt,
        }
        return tuple(kind for kind, value in asked.items() if value)

    @property
    def windows_s(self) -> float:
        """How long its outages last together: they come one after another."""
        return self.partition_s + self.ledger_down_s + self.storage_down_s + self.disk_full_s

    def validate(self) -> DrillPlan:
        """Itself, or a ConfigError that says what to change."""
        _between("--workers", self.workers, 2, WORKERS_MAX, "a drill needs somebody who survives")
        _between("--spares", self.spares, 0, WORKERS_MAX - self.workers, "spares are workers too")
        _between("--hosts", self.hosts, 1, min(HOSTS_MAX, self.workers), "a host has at least one worker")
        _between("--for", self.for_s, 1.0, FOR_S_MAX, "the time in which faults are injected, such as 60s or 2m")
        _between("--stop", self.stop, 0, STOPS_MAX, "how many workers are stopped, one after another")
        if not self.kinds:
            raise ConfigError(
                "the drill has no faults", hint="ask for some, such as --kill-every 10s; `holdfast drill --list`"
            )
        if self.kill_every_s:
            _between("--kill-every", self.kill_every_s, PERIOD_S_MIN, self.for_s, "at most once in the drill's --for")
        self._check_servers()
        self._check_slow()
        self._check_windows()
        if self.corrupt and self.corrupt not in CORRUPTIBLE:
            raise ConfigError(f"--corrupt is {self.corrupt!r:.40}", hint=f"choose one of {', '.join(CORRUPTIBLE)}")
        if self.corrupt and self.workers < 3:
            raise ConfigError(
                f"--corrupt needs 3 workers, and there are {self.workers}",
                hint="of two that disagree nobody knows who is wrong; add --workers 4",
            )
        if self.ranks > 1 and (self.hosts > 1 or self.corrupt):
            raise ConfigError(
                f"{'--hosts' if self.hosts > 1 else '--corrupt'} does not go with --ranks {self.ranks}",
                hint="groups of ranks train on one host, and their states are not compared",
            )
        if self.partition_s and self.hosts < 2:
            raise ConfigError("--partition needs at least 2 hosts to cut", hint="leave --hosts out, or give 2 or more")
        return self

    def _check_servers(self) -> None:
        if bool(self.servers) != bool(self.kill_servers_every_s):
            raise ConfigError(
                "--servers and --kill-servers-every belong together", hint="--servers 3 --kill-servers-every 5s"
            )
        if not self.servers:
            return
        _between("--servers", self.servers, 3, SERVERS_MAX, "a slice outlives a server if 3 or more have it")
        most = "at most once in the drill's --for"
        _between("--kill-servers-every", self.kill_servers_every_s, PERIOD_S_MIN, self.for_s, most)
        if len(self.kinds) > 1:
            raise ConfigError(
                "a drill of parameter servers has no other faults", hint="leave out all but --kill-servers-every"
            )

    def _check_slow(self) -> None:
        for slow in self.slow:
            _between("--slow, the worker", slow.worker, 0, self.workers - 1, "count workers from 0: --slow 1:5x")
            _between(
                "--slow, the factor", slow.times, TIMES_MIN, TIMES_MAX, "--slow 1:5x makes worker 1 5 times slower"
            )
        named = [slow.worker for slow in self.slow]
        if len(set(named)) < len(named):
            raise ConfigError("--slow names a worker twice", hint="give each worker one factor")

    def _check_windows(self) -> None:
        room_s = self.for_s * WINDOWS_SHARE
        if self.windows_s > room_s:
            raise ConfigError(
                f"the outages last {self.windows_s:g} s, and --for {self.for_s:g}s has room for {room_s:g} s of them",
                hint="give a longer --for, or shorter outages",
            )


WINDOWS_SHARE = 0.8  # of the time may be outages: the rest is there to recover in


def parse_slow(value: object) -> SlowWorker:
    match = _SLOW.fullmatch(str(value).strip())
    if match is None:
        raise ConfigError(f"--slow is {str(value)[:40]!r}", hint="name the worker and the factor: --slow 1:5x")
    return SlowWorker(int(match[1]), float(match[2]))


def parse_plan(options: Mapping[str, Any]) -> DrillPlan:
    """From the options' own names, as in the file and on the command line; those that are None are not given."""
    given = {name: value for name, value in options.items() if value is not None}
    durations = {"for", "kill-every", "kill-servers-every", "partition", "ledger-down", "storage-down", "disk-full"}
    settings: dict[str, Any] = {}
    for name, value in given.items():
        if name in durations:
            settings[f"{name.replace('-', '_')}_s"] = _duration(name, value)
        elif name == "slow":
            settings["slow"] = tuple(map(parse_slow, value if isinstance(value, list | tuple) else [value]))
        elif name in ("workers", "spares", "ranks", "hosts", "seed", "stop", "servers"):
            settings[name] = _whole(name, value)
        else:
            settings[name.replace("-", "_")] = str(value)
    if settings.get("partition_s") and "hosts" not in settings:
        settings["hosts"] = 2  # there is nothing to cut between the workers of one host
    return DrillPlan(**settings).validate()


DISK_FULL_S = 10.0


def _duration(name: str, value: object) -> float:
    if name == "disk-full" and isinstance(value, bool):
        return DISK_FULL_S if value else 0.0
    return parse_duration(f"--{name}", str(value))


def _whole(name: str, value: object) -> int:
    return parse_whole(f"--{name}", str(value), "give a whole number")


def read_plan(path: Path) -> dict[str, Any]:
    """The options that a plan file gives, by the names that they have on the command line."""
    try:
        found = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(
            f"cannot read the plan {path}: {error.strerror}", hint="the script and its arguments come after --"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        if path.suffix == ".py":
            raise ConfigError(
                f"{path} is a script, and stands where a plan would",
                hint=f"write -- before it: holdfast drill … -- {path}",
            ) from error
        raise ConfigError(f"{path} is not a plan: {error}", hint="write TOML, such as: kill-every = '10s'") from error
    known = option_names()
    for name in found:
        if name not in known:
            raise ConfigError(f"{path} asks for {name!r:.40}", hint=f"a plan has: {', '.join(sorted(known))}")
    return found


def option_names() -> frozenset[str]:
    return frozenset(one.name.removesuffix("_s").replace("_", "-") for one in fields(DrillPlan))


def _between(what: str, value: float, low: float, high: float, hint: str) -> None:
    if not low <= value <= high:
        raise ConfigError(f"{what} is {value:g}, but must be from {low:g} to {high:g}", hint=hint)
