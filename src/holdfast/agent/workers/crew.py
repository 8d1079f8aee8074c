"""The worker processes of an agent: one table, and everything that touches a process.

Owned by the agent's main thread. Deaths are noticed elsewhere (processes.DeathWatch) and come back as messages.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from holdfast.agent.settings import RunSettings
from holdfast.agent.workers.processes import DeathWatch, WorkerProcess, fence_worker
from holdfast.agent.workers.warm_starts import WarmedUp, WarmStarts
from holdfast.core.errors import HoldfastError, LedgerError, ProtocolError
from holdfast.core.options.run import WARM, WorkerOptions
from holdfast.core.words import (
    KEY_INCARNATIONS,
    KEY_VIEW,
    KEY_WORKERS,
    Registration,
    View,
    decode_whole,
    encode_json,
    host_of,
    incarnation_of,
    slot_of,
    worker_id,
)
from holdfast.devices.visible import devices_of, variables_for
from holdfast.ledger.port import Ledger
from holdfast.placement.directory import RunDirectory
from holdfast.placement.environment import WorkerEnvironment, process_variables
from holdfast.placement.proc import find_workers

WARM_LOG = "imports.log"  # what is said while the script's packages are imported
_LOG_NAME = re.compile(r"w\d+\.\d+(@.+)?")


@dataclass(frozen=True)
class Adoption:
    """What a take-over found: who lives, and whose registrations were of dead processes."""

    living: tuple[str, ...]
    dead: tuple[str, ...]


@dataclass(eq=False)
class Crew:
    _settings: RunSettings
    _directory: RunDirectory
    _socket_dir: Path
    _ledger: Ledger
    _deaths: DeathWatch
    _refused: Callable[[HoldfastError | OSError], None]
    _listen: str
    _processes: dict[str, WorkerProcess] = field(default_factory=dict)
    _incarnations: dict[int, int] = field(default_factory=dict)
    _warm: WarmStarts | None = None

    def __len__(self) -> int:
        return len(self._processes)

    def __contains__(self, worker: str) -> bool:
        return worker in self._processes

    def pid(self, worker: str) -> int:
        return self._processes[worker].pid

    def log_path(self, worker: str) -> Path:
        return self._directory.logs / f"{worker}.log"

    def start(self, slot: int) -> str:
        """Start a worker in `slot`. Raises OSError if the system does not let us."""
        worker = worker_id(slot, self._next_incarnation(slot), self._settings.host)
        variables, log = self._variables(worker), self._new_log(worker)
        if self._warm is not None:
            if self._warm.ready:
                forked = self._warm.start(variables, log)
                if forked is not None:
                    self._take(WorkerProcess(worker, forked[0], parent=forked[1]))
                    return worker
                # It may yet have started one, that nobody knows: that one has its name for itself.
                worker = worker_id(slot, self._next_incarnation(slot), self._settings.host)
                variables, log = self._variables(worker), self._new_log(worker)
            self._warm.prepare(variables)
        self._take(WorkerProcess.start(worker, self._settings.worker_command(), variables, log))
        return worker

    def warm_up(self, post: Callable[[WarmedUp], None]) -> bool:
        """Begin to import what the workers need, once for all of them. True if that is worth waiting for."""
        if self._settings.start != WARM or not self._settings.script:
            return False
        self._warm = WarmStarts(self._settings.worker_command(), self._directory.logs / WARM_LOG, post)
        return self._warm.prepare(self._variables(""))

    def close(self) -> None:
        """Let go of everything but the workers."""
        if self._warm is not None:
            self._warm.close()

    def _variables(self, worker: str) -> dict[str, str]:
        settings = self._settings
        place = WorkerEnvironment(
            **{one.name: getattr(settings, one.name) for one in fields(WorkerOptions)},
            run_dir=self._directory.path,
            worker=worker,
            socket_dir=self._socket_dir,
            checkpoint=settings.checkpoint.placed(self._directory.path, alone=not settings.ledger).encode(),
        )
        # The ledger that the agent serves itself is never away for long.
        place = replace(place, listen=self._listen, outage_s=settings.outage_s if settings.ledger else 0.0)
        # The process that workers are forked from, which has no name, opens no device, and sees them as this one does.
        devices = devices_of(settings.devices, os.environ) if worker else None
        return {
            **os.environ,
            **place.to_variables(),
            **process_variables(),
            **variables_for(slot_of(worker) if worker else 0, devices, os.environ),
        }

    def _new_log(self, worker: str) -> Path:
        log = self.log_path(worker)
        try:
            log.touch()
        except OSError as error:  # a full disk costs the output, not the worker
            self._refused(error)
            return Path(os.devnull)
        return log

    def _take(self, process: WorkerProcess) -> None:
        self._processes[process.worker] = process
        self._deaths.add(process)

    def _next_incarnation(self, slot: int) -> int:
        """One more than this slot has had, by the ledger, the logs on disk and our own memory."""
        known = self._incarnations.get(slot, 0)
        if not known:
            names = [path.name.removesuffix(".log") for path in self._directory.logs.glob(f"w{slot}.*.log")]
            known = max((incarnation_of(name) for name in names if _LOG_NAME.fullmatch(name)), default=0)
        key = f"{KEY_INCARNATIONS}{slot}@{self._settings.host}" if self._settings.host else f"{KEY_INCARNATIONS}{slot}"
        try:
            entry = self._ledger.get(key)
            if entry is not None:
                known = max(known, decode_whole(entry.value, "count"))
            self._ledger.put(key, encode_json({"count": known + 1}))
        except (LedgerError, ProtocolError) as error:
            self._refused(error)
        self._incarnations[slot] = known + 1
        return known + 1

    def adopt_living(self, known_pids: Mapping[str, int]) -> Adoption:
        """Find the workers that an earlier agent left behind, and clear up after those that died since.

        A process that carries a worker's name but not the process id that was written down is some daemon that
        the worker started. Two living workers of one slot: the older is not part of anyone's plan, and is ended.
        """
        newest: dict[int, tuple[int, str]] = {}
        processes: dict[str, WorkerProcess] = {}
        for found in find_workers(self._directory.path):
            if known_pids.get(found.worker, found.pid) != found.pid:
                continue
            process = WorkerProcess.adopt(found.worker, found.pid, found.started)
            if process is not None:
                processes[found.worker] = process
                slot = slot_of(found.worker)
                newest[slot] = max(newest.get(slot, (0, "")), (incarnation_of(found.worker), found.worker))
        living = {name for _, name in newest.values()}
        for name, process in processes.items():
            if name in living:
                self._take(process)
            else:
                process.kill()
                process.close()
        return Adoption(tuple(sorted(living)), tuple(self._clear_up(living)))

    def _clear_up(self, living: set[str]) -> list[str]:
        """Whose registrations were of dead processes. Who left none, for want of a lease, is said to be dead too."""
        registered = [entry.key[len(KEY_WORKERS) :] for entry in self._ledger.read(KEY_WORKERS).entries]
        dead = [worker for worker in registered if worker not in living and host_of(worker) == self._settings.host]
        for worker in (*dead, *self._missed(living, registered)):
            try:
                fence_worker(self._ledger, worker)
            except LedgerError as error:  # its lease will run out
                self._refused(error)
        return dead

    def _missed(self, living: set[str], registered: Sequence[str]) -> list[str]:
        """Members of the view that ran here, by their logs, and do no more: who has no state waits for them."""
        with suppress(ProtocolError):
            view = self._ledger.get(KEY_VIEW)
            members = View.decode(view.value).members if view is not None else ()
            here = [
                member for member in members if host_of(member) == self._settings.host and _LOG_NAME.fullmatch(member)
            ]
            known = {*living, *registered}
            return [member for member in here if member not in known and self.log_path(member).exists()]
        return []

    def adopt_stranger(self, registration: Registration) -> bool:
        """A worker registers that nobody here started: an agent died in the moment between. False if it is dead."""
        process = WorkerProcess.adopt(registration.id, registration.pid, registration.pid_started)
        if process is None:
            return False
        self._take(process)
        return True

    def end_stranger(self, registration: Registration) -> None:
        """Like `adopt_stranger`, but its slot has another worker."""
        process = WorkerProcess.adopt(registration.id, registration.pid, registration.pid_started)
        if process is not None:
            process.kill()
            process.close()

    def ask_to_leave(self, worker: str) -> None:
        self._processes[worker].send(signal.SIGTERM)

    def ask_all_to_leave(self) -> None:
        for process in self._processes.values():
            process.send(signal.SIGTERM)

    def kill(self, worker: str) -> None:
        if worker in self._processes:
            self._processes[worker].kill()

    def forget(self, worker: str) -> None:
        self._processes.pop(worker, None)
