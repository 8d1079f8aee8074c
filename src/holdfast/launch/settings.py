"""What a run is asked to be: the options of `holdfast run`, checked before anything is started."""

from __future__ import annotations

import re
import shlex
import socket
import sys
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from holdfast.core.errors import ConfigError
from holdfast.launch.environment import PATHS

WORKERS_MAX = 1024
THREADS_MAX = 1024
RESTARTS_MAX = 1_000_000
LEASE_S_MIN, LEASE_S_MAX = 0.2, 3600.0
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PORTS = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """One run on one host. `script` is a path or, if `module` is true, the name of a module (python -m)."""

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
        if self.path not in PATHS:
            raise ConfigError(f"--path is {self.path!r}", hint=f"choose one of {', '.join(PATHS)}")
        if self.listen:
            parse_listen(self.listen)
            if self.path == "shared-memory":
                raise ConfigError(
                    "--listen is for the network path, and --path asks for shared memory",
                    hint="leave out one of them; workers of one host need no --listen",
                )
        if not self.module:
            _check_script(self.script)

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
    defaults = {field.name: field.default for field in fields(RunSettings)}
    words = ["holdfast", "run", "--run", settings.name, "--workers", str(settings.workers), "--dir", str(home)]
    for option, name in (
        ("--spares", "spares"),
        ("--restarts", "restarts"),
        ("--threads", "threads"),
        ("--path", "path"),
        ("--listen", "listen"),
        ("--lease", "lease_s"),
    ):
        value = getattr(settings, name)
        if value != defaults[name]:
            words += [option, str(value)]
    return shlex.join([*words, *(["-m"] if settings.module else []), settings.script, *settings.arguments])


def check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"{name!r} cannot be the name of a run",
            hint="use up to 64 letters, digits, dots, dashes and underscores, starting with a letter or digit",
        )


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


def parse_listen(listen: str) -> tuple[str, range]:
    """`HOST`, `HOST:PORT` or `HOST:FIRST-LAST`; the range is empty if any port will do."""
    host, colon, ports = listen.rpartition(":")
    if not colon:
        return listen, range(0)
    match = _PORTS.fullmatch(ports)
    if match is None or not host:
        raise ConfigError(
            f"--listen {listen} is neither HOST nor HOST:FIRST-LAST", hint="for example --listen 127.0.0.1:29500-29599"
        )
    first = int(match[1])
    last = int(match[2] or match[1])
    if not 1 <= first <= last <= 65535:
        raise ConfigError(
            f"--listen {listen}: {ports} is not a range of ports", hint="ports are from 1 to 65535, the lower first"
        )
    return host.strip("[]"), range(first, last + 1)


def check_listen(listen: str, needed: int) -> None:
    """Fail now, in one sentence, rather than later in every worker."""
    host, ports = parse_listen(listen)
    try:
        family, _, _, _, _ = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(
            f"--listen: {host} is not an address of this host ({error})", hint="try --listen 127.0.0.1"
        ) from error
    free = 0
    refusal = ""
    for port in ports or range(1):
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As servers do: a port that only waits out its last connection is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
                probe.listen(1)
            except OSError as error:
                refusal = error.strerror or str(error)
            else:
                free += 1
        if free >= needed:
            return
    if not ports and free:
        return
    if not ports:
        raise ConfigError(f"--listen: cannot listen on {host}: {refusal}", hint="try --listen 127.0.0.1")
    raise ConfigError(
        f"--listen {listen}: {free} of {len(ports)} ports can be used and the run needs {needed}"
        + (f" ({refusal})" if refusal else ""),
        hint="give a wider range or another one; workers and spares need a port each",
    )
