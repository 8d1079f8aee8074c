"""The edge of a worker's process: how a run ends when its script does, and with which exit code.

A worker's end is an ordinary exception (WorkerEnded in core/errors.py): a notebook, an actor or a trainer may catch it,
and join again. In a script that is a process of its own nobody catches it. Then it becomes the exit code, here or in
placement/bootstrap.py, without a traceback.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from types import TracebackType
from typing import Any

from holdfast.core.errors import ConfigError, WorkerEnded
from holdfast.engine.api.run import Run
from holdfast.engine.place import WorkerPlace
from holdfast.engine.recovery.leaving import LeaveRequested
from holdfast.engine.reporting import line_of_script
from holdfast.placement import exit_status

# What asks a worker to leave in order where a launcher and not an agent has started it. Slurm's notice before it ends a
# job is a signal that the job chooses, mostly SIGUSR1.
NOTICES = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
    signal.SIGUSR1: signal.SIG_DFL,
}

_taken: dict[str, ProcessEdge] = {}  # workers that this process was or is, by id: each can be taken once


class ProcessEdge:
    """Leave the run when the script ends; tell an error from a normal end; SIGTERM asks to leave in order."""

    def __init__(self, run: Run, place: WorkerPlace) -> None:
        self._run = run
        self._place = place
        self._failed = False
        self._previous = sys.excepthook
        self._usual: dict[int, Any] = {}  # what the signals did that ask to leave
        self._unattended = False
        self._process = os.getpid()  # a child that the script forks inherits all this, and is not the worker
        if place.environment is not None:
            release_left()
            _taken[place.me] = self
        sys.excepthook = self._note_failure
        atexit.register(self._end)
        if place.environment is None or threading.current_thread() is not threading.main_thread():
            return
        self._unattended = bool(place.environment.launcher)
        for number, usual in NOTICES.items() if self._unattended else [(signal.SIGTERM, signal.SIG_DFL)]:
            if signal.getsignal(number) in (usual, None):
                self._usual[number] = usual
                signal.signal(number, self._asked_to_leave)

    @property
    def has_left(self) -> bool:
        return self._run.is_closed

    def release(self) -> None:
        """The run is closed, and this process joins again: as if it had not been there."""
        self._place.close()
        atexit.unregister(self._end)
        if sys.excepthook == self._note_failure:
            sys.excepthook = self._previous
        if threading.current_thread() is threading.main_thread():
            for number, usual in self._usual.items():
                if signal.getsignal(number) == self._asked_to_leave:
                    signal.signal(number, usual)

    def _note_failure(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() != self._process:
            self._previous(kind, error, trace)
            return
        if isinstance(error, WorkerEnded):
            raise SystemExit(error.code)  # which Python takes from here as the process's own
        self._failed = True
        if kind is KeyboardInterrupt and self._run._worker.is_over:
            return  # it has said so, and the step is whole
        reason = f"{kind.__name__}: {error}".partition("\n")[0]
        self._place.events.write("failed", reason=reason, place=line_of_script(trace), step=self._run.step)
        self._previous(kind, error, trace)
        if "deterministic implementation" in str(error):
            print(
                "holdfast: this operation gives different bits from run to run, so training cannot be exact\n"
                "  hint: replace it with a deterministic one; the message above names it",
                file=sys.stderr,
            )

    def _end(self) -> None:
        if os.getpid() != self._process:
            return
        over = self._run._worker.leaving.over
        if isinstance(over, WorkerEnded) and over.code and not self._failed:
            exit_status.want(over.code)  # also of a script that has caught it
        try:
            self._run.close(failed=self._failed, at_exit=True)
        except WorkerEnded as end:
            exit_status.want(end.code)
            if not exit_status.is_obeyed:  # Python has no other way to change its mind about the code
                self._place.close()
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(end.code)
        self._place.close()

    def _asked_to_leave(self, number: int, _frame: object) -> None:
        if os.getpid() == self._process:
            # Where no agent asks, the exit code is all that a launcher learns of why the worker has ended.
            self._place.mailbox.put(LeaveRequested(number if self._unattended else 0))
            if number == signal.SIGINT:
                signal.signal(number, signal.default_int_handler)  # once more ends it at once
        else:
            signal.signal(number, self._usual[number])
            os.kill(os.getpid(), number)


def release_left() -> None:
    """What earlier workers of this process, which have left, still hold of it."""
    for edge in _taken.values():
        if edge.has_left:
            edge.release()


def check_free(worker: str) -> None:
    """ConfigError if this process is that worker already, or was."""
    edge = _taken.get(worker)
    if edge is None:
        return
    if not edge.has_left:
        raise ConfigError(
            "holdfast.join was called twice in one worker",
            hint="a script is one run: join once, with all that it trains",
        )
    name, _, number = worker.partition("@")[0].rpartition(".")
    again = worker.replace(f"{name}.{number}", f"{name}.{int(number) + 1}", 1) if number.isdecimal() else "another"
    raise ConfigError(
        f"{worker} has left the run, and the others do not know it any more",
        hint=f"a worker comes back under another number: set HOLDFAST_WORKER={again} before holdfast.join",
    )


def newest_run() -> Run | None:
    """The run that this process has joined last."""
    edges = list(_taken.values())
    return edges[-1]._run if edges else None


def progress_of_newest() -> tuple[int, bool]:
    """From any thread: the step of the newest run, and whether its loop over steps has come to its end."""
    run = newest_run()
    return (0, False) if run is None else (run.step, run.is_closed or run.is_between_loops)


def ask_to_leave() -> bool:
    """As SIGTERM does, from any thread of this process. False: it is no worker, or not any more."""
    edges = [edge for edge in _taken.values() if not edge.has_left]
    for edge in edges:
        edge._place.mailbox.put(LeaveRequested())
    return bool(edges)
