"""The process that serves a run's ledger where no agent does: beside workers that torchrun, srun or mpirun started.

    python -m holdfast.agent.ledger_process RUN_DIR SOCKET_DIR [--fresh]

It starts and replaces nobody. It serves the ledger, says there at once which workers' processes are gone, so that the
others need not wait for leases, and ends when none is left. It holds the lock of the run's directory; where another
has that, it ends without a word. What it serves is on disk: a worker that misses it starts another.

Threads: main looks after the workers; DeathWatch and the server have theirs.
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

from holdfast.agent.workers.processes import DeathWatch, WorkerProcess
from holdfast.checkpoint.host_memory.place import MEMORY_ONLY
from holdfast.core.errors import ConfigError, HoldfastError, LedgerError, ProtocolError
from holdfast.core.words import KEY_CHECKPOINT, KEY_DONE, KEY_STOP, KEY_WORKERS, Registration, decode_json
from holdfast.ledger.embedded import EmbeddedLedger, EmbeddedServer
from holdfast.ledger.port import Ledger
from holdfast.placement.directory import RunDirectory
from holdfast.placement.environment import LEDGER_SOCKET
from holdfast.placement.ledger_served import FRESH, locked_for_launch

LOOK_S = 0.1
FIRST_S = 120.0  # for the first worker: it imports torch before it registers
LINGER_S = 10.0  # after the last: a launcher that starts all of them again needs a moment


class LedgerProcess:
    """Belongs to the main thread."""

    def __init__(self, ledger: Ledger, deaths: DeathWatch) -> None:
        self._ledger = ledger
        self._deaths = deaths
        self._watched: set[str] = set()
        self._until = time.monotonic() + FIRST_S

    def begin(self) -> None:
        """A new launch of a run that was stopped, or is finished: it goes on if its script has more steps."""
        self._ledger.delete(KEY_STOP)
        entry = self._ledger.get(KEY_CHECKPOINT)
        if entry is not None and decode_json(entry.value).get("uri") != MEMORY_ONLY:
            self._ledger.delete(KEY_DONE)

    def watch(self) -> None:
        """Until nobody is left."""
        while time.monotonic() < self._until:
            try:
                self._look()
            except (LedgerError, ProtocolError) as error:
                print(error, file=sys.stderr, flush=True)
            time.sleep(LOOK_S)

    def _look(self) -> None:
        for entry in self._ledger.read(KEY_WORKERS).entries:
            self._until = time.monotonic() + LINGER_S  # it has a lease, so it lives or did a moment ago
            registration = Registration.decode(entry.value)
            if registration.id not in self._watched:
                self._watched.add(registration.id)
                process = WorkerProcess.adopt(registration.id, registration.pid, registration.pid_started)
                if process is not None:  # else its lease runs out
                    self._deaths.add(process)


def main(arguments: list[str]) -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # meant for the workers, who leave in order and need it for that
    path, socket_dir, *options = arguments
    directory = _directory(Path(path))
    try:
        with directory.locked():
            _serve(directory, Path(socket_dir) / LEDGER_SOCKET, fresh=FRESH in options)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 0 if directory.agent() is not None else 1
    except HoldfastError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _directory(path: Path) -> RunDirectory:
    """Of `HOME/runs/NAME`."""
    return RunDirectory(path.parents[1], path.name)


def _serve(directory: RunDirectory, socket: Path, *, fresh: bool) -> None:
    secret = directory.secret()
    socket.parent.mkdir(mode=0o700, exist_ok=True)
    server = EmbeddedServer(directory.ledger, socket, secret)
    server.start()
    ledger = EmbeddedLedger(socket, secret)
    deaths = DeathWatch(EmbeddedLedger(socket, secret), lambda *_: None)
    try:
        process = LedgerProcess(ledger, deaths)
        if fresh:
            process.begin()
        process.watch()
    finally:
        deaths.close()
        ledger.close()
        server.stop()
        with locked_for_launch(directory.path, wait=False) as alone:
            if alone:  # else a new launch is just about to use them
                directory.remove_dead_sockets(socket.parent)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
