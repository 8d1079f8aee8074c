"""What a client of masked rounds must not forget between two messages, in a file of its own.

Flower runs a client's app in a process of its own for each message, may run two at once, and takes its
`Context.state` back when the answer is on its way already. A server that is told two things by one client, each from
the same memory, opens that client's peers (privacy/terms.py). So memory is a file: whoever handles a message holds its
lock, and what was answered is on disk before the answer leaves. The file has secrets while a round lasts, is readable
by its owner only, and belongs to one client in one run of Flower.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from holdfast.byzantine.agreement.canonical import pack, unpack
from holdfast.core.errors import ConfigError, ProtocolError

KEPT_S = 30 * 86400.0  # files of runs that nobody has touched for so long are deleted
LOCK_SUFFIX = ".lock"


class Journal:
    """Open in one process at a time. `round`: the last that was announced; 0 before the first."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.round = 0
        self.kept = b""  # of the round under way; empty if there is none
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return
        known = unpack(content)
        if not isinstance(known, tuple) or list(map(type, known)) != [int, bytes]:
            raise ProtocolError(f"{path} is not what a client keeps of masked rounds")
        self.round, self.kept = known

    def write(self, round: int, kept: bytes) -> None:
        """On disk when this returns."""
        unfinished = self._path.with_name(self._path.name + ".tmp")
        unfinished.touch(mode=0o600)
        with unfinished.open("wb") as file:
            file.write(pack((round, kept)))
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(self._path)
        self.round, self.kept = round, kept


@contextmanager
def opened(directory: Path, name: str) -> Iterator[Journal]:
    """Waits until no other process has it. ConfigError if it cannot be kept there."""
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(directory / (name + LOCK_SUFFIX), os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(
            f"a client of masked rounds cannot keep what it must in {directory}: {error.strerror}",
            hint="MaskedUpdates(directory=…) names a place that all processes of this client share",
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.utime(lock)  # in use: `forget_old` leaves it alone
        yield Journal(directory / name)
    finally:
        os.close(lock)


def forget_old(directory: Path) -> None:
    for path in directory.iterdir():
        try:
            if time.time() - path.stat().st_mtime > KEPT_S:
                path.unlink()
        except FileNotFoundError:
            pass  # another client did it


def default_directory() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "holdfast" / "masked"
