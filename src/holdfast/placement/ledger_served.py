"""That somebody serves the ledger of a run on one host that no agent has started: a process, and who starts it.

Any worker starts it when nobody listens: the first one that comes, and whoever misses it later. Its lock on the run's
directory lets one of those processes stay. What it serves is on disk, so its death loses nothing.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdfast.core.errors import ConfigError, LedgerUnavailable
from holdfast.ledger.embedded import EmbeddedLedger
from holdfast.ledger.wire import Request
from holdfast.placement.directory import is_listened_on
from holdfast.placement.environment import LEDGER_SOCKET

PROGRAM = "holdfast.agent.ledger_process"
FRESH = "--fresh"  # this launch is not one that goes on after a failure
LOG = "ledger.log"
_LOCK = "launch.lock"
START_AGAIN_S = 5.0
_LOOK_S = 0.02

_started: list[subprocess.Popen[bytes]] = []  # so that nobody complains of children that are let go


class RestartedLedger(EmbeddedLedger):
    """A client that starts the server again when nobody listens. The call that found it out fails all the same."""

    def __init__(self, run_dir: Path, socket_dir: Path, secret: bytes) -> None:
        super().__init__(socket_dir / LEDGER_SOCKET, secret)
        self._run_dir, self._socket_dir = run_dir, socket_dir
        self._started_at = 0.0

    def _ask(self, request: Request) -> Any:
        try:
            return super()._ask(request)
        except LedgerUnavailable:
            now = time.monotonic()
            if not self._closed and now >= self._started_at + START_AGAIN_S:
                self._started_at = now
                if not is_listened_on(self._socket_dir / LEDGER_SOCKET):
                    _start(self._run_dir, self._socket_dir)
            raise


@contextmanager
def locked_for_launch(run_dir: Path, *, wait: bool = True) -> Iterator[bool]:
    """One process at a time prepares the run's directory, or clears it up. False: another one does, and we do not wait.
    The kernel drops the lock with the process."""
    with (run_dir / _LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True


def see_that_it_is_served(run_dir: Path, socket_dir: Path, *, wait_s: float, fresh: bool) -> None:
    """Come back when somebody listens; ConfigError if nobody does in time."""
    deadline, child = time.monotonic() + wait_s, None
    while not is_listened_on(socket_dir / LEDGER_SOCKET):
        if child is None or child.poll() is not None:  # another one has the lock, and may be about to end
            if time.monotonic() >= deadline:
                raise ConfigError(
                    f"the run's ledger does not start: {_last_words(run_dir)}", hint=f"see {run_dir / 'logs' / LOG}"
                )
            child = _start(run_dir, socket_dir, *([FRESH] if fresh else []))
        time.sleep(_LOOK_S)


def _start(run_dir: Path, socket_dir: Path, *options: str) -> subprocess.Popen[bytes]:
    """In a session of its own: what ends the workers, or one of them, does not end it."""
    with (run_dir / "logs" / LOG).open("ab", buffering=0) as log:
        child = subprocess.Popen(
            [sys.executable, "-m", PROGRAM, str(run_dir), str(socket_dir), *options],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    _started[:] = [one for one in _started if one.poll() is None]
    _started.append(child)
    return child


def _last_words(run_dir: Path) -> str:
    try:
        return (run_dir / "logs" / LOG).read_text().strip().splitlines()[-1][-200:]
    except (OSError, IndexError):
        return "it says nothing"
