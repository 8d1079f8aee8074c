"""The run directory on disk: where it is, who may use it, and what stands in run.json.

The directory belongs to the agent that holds the lock on `agent.lock`. Workers only read run.json and secret,
and append to their own files. The layout is described in placement/environment.py.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from holdfast.core.errors import ConfigError
from holdfast.placement.environment import LEDGER_SOCKET
from holdfast.placement.naming import NAME, check_name
from holdfast.placement.proc import process_started

HOME = "HOLDFAST_DIR"
SOCKET_DIR_BYTES_MAX = 72  # a unix socket's path has at most 107 bytes; names in the directory get the rest
DISK_PROBE_BYTES = 1024 * 1024


def home_directory(argument: str | None) -> Path:
    """`--dir`, else $HOLDFAST_DIR, else ~/.holdfast."""
    chosen = argument or os.environ.get(HOME) or str(Path("~") / ".holdfast")
    try:
        return Path(chosen).expanduser().resolve()
    except (RuntimeError, OSError, ValueError) as error:  # nobody's home is known, or a circle of links
        raise ConfigError(
            f"{chosen!r} cannot be found: {str(error).rstrip('.').lower()}",
            hint="say where runs are kept, with --dir DIR or $HOLDFAST_DIR",
        ) from error


def runs_directory(home: Path) -> Path:
    return home / "runs"


def fresh_name(home: Path, script: str, *, now: float) -> str:
    """The script's stem and the time, made unique and reserved by making its directory."""
    stem = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in Path(script).stem)
    base = f"{stem.lstrip('._-')[:40] or 'run'}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}"
    name, number = base, 1
    while True:
        folder = runs_directory(home) / name
        try:
            folder.mkdir(parents=True, mode=0o700)
            return name
        except FileExistsError:
            number += 1
            name = f"{base}-{number}"
        except OSError as error:
            raise _unwritable(folder, error) from error


def runs_in(home: Path) -> list[RunDirectory]:
    """Everything that looks like a run. Of a run on several hosts, each host's part by itself."""
    found = []
    with contextlib.suppress(OSError):
        for path in sorted(runs_directory(home).iterdir()):
            name, at, host = path.name.partition("@")
            if NAME.fullmatch(name) and (not at or NAME.fullmatch(host)) and (path / "run.json").is_file():
                found.append(RunDirectory(home, name, host))
    return found


def replace_file(path: Path, content: str) -> None:
    """Whoever reads it meanwhile finds the old one or the new one, whole."""
    partial = path.with_name(f".{path.name}.new")
    partial.write_text(content)
    partial.replace(path)


class RunDirectory:
    """Paths of one run, or of one host's part of it: hosts may share a home directory."""

    def __init__(self, home: Path, name: str, host: str = "") -> None:
        check_name(name)
        self.home = home
        self.name = name
        self.host = host
        self.path = runs_directory(home) / (f"{name}@{host}" if host else name)
        self.ledger = self.path / "ledger"
        self.logs = self.path / "logs"
        self.events = self.path / "events"

    def exists(self) -> bool:
        return (self.path / "run.json").is_file()

    def create(self) -> None:
        """Make what is missing. A directory that cannot be written is the caller's to mend."""
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            for folder in (self.ledger, self.logs, self.events):
                folder.mkdir(exist_ok=True)
            self._probe_disk()
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def _probe_disk(self) -> None:
        probe = self.path / f".probe-{os.getpid()}"
        try:
            with probe.open("wb") as file:
                file.write(bytes(DISK_PROBE_BYTES))
                file.flush()
                os.fsync(file.fileno())
        finally:
            probe.unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the agent's lock. The kernel drops it with the process, however that ends."""
        try:
            file = (self.path / "agent.lock").open("a+")
        except OSError as error:
            raise _unwritable(self.path, error) from error
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                file.seek(0)
                holder = file.read().split()
                raise ConfigError(
                    f"run {self.name} already has an agent" + (f" (process {holder[0]})" if holder else ""),
                    hint=f"look at it with `holdfast status {self.name}`, or choose another --run name",
                ) from error
            file.truncate(0)
            file.write(f"{os.getpid()} {process_started(os.getpid())}\n")
            file.flush()
            yield
            file.truncate(0)

    def agent(self) -> int | None:
        """The process id of the agent that lives, seen without touching its lock."""
        try:
            pid, started = map(int, (self.path / "agent.lock").read_text().split())
        except (OSError, ValueError):
            return None
        return pid if process_started(pid) == started else None

    def secret(self) -> bytes:
        """Read the run's secret; the first agent makes it."""
        path = self.path / "secret"
        if not path.exists():
            partial = path.with_suffix(".new")
            partial.unlink(missing_ok=True)
            with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
                file.write(secrets.token_hex(32) + "\n")
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        return bytes.fromhex(path.read_text().strip())

    def read(self) -> dict[str, Any]:
        """run.json, or {} if there is none."""
        try:
            value = json.loads((self.path / "run.json").read_text())
        except (OSError, ValueError):
            return {}
        return value if isinstance(value, dict) else {}

    def write(self, value: Mapping[str, Any]) -> None:
        replace_file(self.path / "run.json", json.dumps(value, indent=1) + "\n")

    def socket_dir(self) -> Path:
        """A private directory with a short path: the one that living workers know, or a new one."""
        inside = self.path / "s"
        known = self.read().get("socket_dir")
        if isinstance(known, str) and known and (Path(known) == inside or _is_short(Path(known))):
            with contextlib.suppress(OSError):
                return _private(Path(known))
        if _is_short(inside):
            return _private(inside)
        temporary = Path(tempfile.gettempdir())
        if not _is_short(temporary / "holdfast-12345678"):
            temporary = Path("/tmp")
        return Path(tempfile.mkdtemp(prefix="holdfast-", dir=temporary))

    def recorded_ledger_socket(self) -> Path | None:
        known = self.read().get("socket_dir")
        return Path(known) / LEDGER_SOCKET if isinstance(known, str) and known else None

    def remove_sockets(self, socket_dir: Path) -> None:
        """When no worker lives any more: nothing of the run stays outside its directory."""
        shutil.rmtree(socket_dir, ignore_errors=True)

    def remove_dead_sockets(self, socket_dir: Path) -> None:
        """The same, where workers may come at any moment: what somebody listens on stays, and the directory with it."""
        try:
            for path in socket_dir.iterdir():
                if stat.S_ISSOCK(path.lstat().st_mode) and not is_listened_on(path):
                    path.unlink(missing_ok=True)
            socket_dir.rmdir()
        except OSError:
            pass  # somebody has come, or has cleared it up


def is_listened_on(path: Path) -> bool:
    """Whether a process has this socket and listens."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(os.fspath(path))
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        except OSError:
            pass  # it is busy
    return True


def _is_short(path: Path) -> bool:
    return len(os.fsencode(path)) <= SOCKET_DIR_BYTES_MAX


def _private(path: Path) -> Path:
    """Make `path` or check that it is ours alone: in a shared temporary directory it may be someone's trap."""
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise PermissionError(errno.EPERM, "not a directory of this user", str(path))
    path.chmod(0o700)
    return path


def _unwritable(path: Path, error: OSError) -> ConfigError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ConfigError(f"the disk under {path} is full", hint="free some space, or choose another place with --dir")
    return ConfigError(
        f"cannot write to the run directory {path}: {error.strerror or error}",
        hint="choose a place of yours with --dir DIR or $HOLDFAST_DIR",
    )
