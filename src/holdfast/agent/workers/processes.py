"""Worker processes: starting and adopting them, and noticing their death within milliseconds.

Threads: `DeathWatch` has one of its own. It does nothing but wait for deaths, fence the dead in the ledger and
report them, so that neither output nor disks delay a recovery. A `WorkerProcess` may be signalled from any thread.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from holdfast.core.errors import HoldfastError, LedgerUnavailable
from holdfast.core.words import KEY_DEAD, KEY_VIEW, KEY_WORKERS, View
from holdfast.ledger.port import Ledger
from holdfast.placement.proc import bury, process_started

DEAD_MAX = 128
FENCE_AGAIN_S = 0.5
CLOSE_S = 1.0


class Parent(Protocol):
    """Of a worker's process: who alone learns how it ended."""

    def bury(self, pid: int) -> int | None:
        """Its exit code, less than 0 for a signal, once it is gone; None if that is not known."""


class _ThisProcess:
    def __init__(self, child: subprocess.Popen[bytes]) -> None:
        self._child = child

    def bury(self, pid: int) -> int | None:
        self._child.returncode = bury(pid)
        return self._child.returncode


def _inherited(pid: int) -> int | None:
    """The exit code of a process whose parent died before it, where this one is next in line, as in a container."""
    try:
        done, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return None
    return os.waitstatus_to_exitcode(status) if done else None


class WorkerProcess:
    """A worker that this agent started, or one that it found running, whose parent nobody can ask."""

    def __init__(self, worker: str, pid: int, *, parent: Parent | None = None) -> None:
        self.worker = worker
        self.pid = pid
        self.pidfd = os.pidfd_open(pid)
        self._parent = parent
        self._lock = threading.Lock()
        self._gone = False

    @classmethod
    def start(cls, worker: str, command: Sequence[str], variables: Mapping[str, str], log: Path) -> WorkerProcess:
        """Start in a session of its own, so that the terminal's Ctrl-C reaches the agent only.

        Output goes to a file and not through the agent: a worker must not break when the agent dies.
        """
        with log.open("ab", buffering=0) as output:
            child = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=dict(variables),
            )
        return cls(worker, child.pid, parent=_ThisProcess(child))

    @classmethod
    def adopt(cls, worker: str, pid: int, started: int) -> WorkerProcess | None:
        """Watch a process that lives already; None if it is gone."""
        try:
            process = cls(worker, pid)
        except OSError:
            return None
        if process_started(pid) != started:  # checked after the descriptor was opened: the pid may be reused
            process.close()
            return None
        return process

    def send(self, number: signal.Signals) -> None:
        with self._lock:
            if not self._gone:
                try:
                    signal.pidfd_send_signal(self.pidfd, number)
                except ProcessLookupError:
                    pass

    def kill(self) -> None:
        """SIGKILL to the worker and to its children. Works on stopped processes too."""
        with self._lock:
            if self._gone:
                return
            self._kill_group()
            try:
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def reap(self) -> tuple[int | None, int | None]:
        """Collect the exit of a process that is gone: (code, signal). An adopted one takes its with it."""
        with self._lock:
            self._gone = True
            code = self._parent.bury(self.pid) if self._parent is not None else None
            if code is None:
                code = _inherited(self.pid)
        if code is None:
            return None, None
        return (code, None) if code >= 0 else (None, -code)

    def _kill_group(self) -> None:
        """Only while the leader lives: until then its process id, and so the group's, is its own."""
        if not self._lives():
            return
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass

    def _lives(self) -> bool:
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return not poll.poll(0)

    def ended_within(self, timeout_s: float) -> bool:
        """Whether it is gone, or goes in that time."""
        poll = select.poll()
        with self._lock:
            if self._gone:
                return True
            poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def close(self) -> None:
        with self._lock:
            self._gone = True
            os.close(self.pidfd)


class DeathWatch:
    """Waits for the death of any process; fences it; then calls `report(process, code, signal, trouble)`.

    Owns `ledger`. `fence` says there that this one is gone, `tidy` keeps what is said there small.
    """

    def __init__(
        self,
        ledger: Ledger,
        report: Callable[[WorkerProcess, int | None, int | None, str], None],
        *,
        fence: Callable[[Ledger, str], object] | None = None,
        tidy: Callable[[Ledger], object] | None = None,
    ) -> None:
        self._ledger = ledger
        self._report = report
        self._fence = fence or fence_worker
        self._tidy = tidy or forget_the_long_dead
        self._processes: dict[int, WorkerProcess] = {}
        self._unfenced: list[str] = []  # the ledger did not answer when they died
        self._epoll = select.epoll()
        self._wake_read, self._wake_write = os.pipe()
        self._epoll.register(self._wake_read, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="holdfast-deaths", daemon=True)
        self._thread.start()

    def add(self, process: WorkerProcess) -> None:
        self._processes[process.pidfd] = process
        self._epoll.register(process.pidfd, select.EPOLLIN)

    def close(self) -> None:
        """What the thread uses it closes itself: it may be waiting for the ledger for longer than anybody waits for
        it. A ledger that has not answered by then is given up, and its calls with it."""
        os.close(self._wake_write)
        self._thread.join(timeout=CLOSE_S)
        self._ledger.close()
        self._thread.join(timeout=CLOSE_S)

    def _run(self) -> None:
        try:
            self._wait_for_deaths()
        finally:
            self._epoll.close()
            os.close(self._wake_read)

    def _wait_for_deaths(self) -> None:
        while True:
            ready = [descriptor for descriptor, _ in self._epoll.poll(FENCE_AGAIN_S if self._unfenced else None)]
            for descriptor in ready:
                if descriptor != self._wake_read:
                    self._bury(self._processes.pop(descriptor))
            self._fence_again()
            if self._wake_read in ready:
                return

    def _fence_again(self) -> None:
        """The others wait for the ledger to say who died: as soon as it is back, not when the lease runs out."""
        while self._unfenced:
            try:
                self._fence(self._ledger, self._unfenced[0])
            except LedgerUnavailable:
                return
            except (HoldfastError, OSError):
                pass  # it answers, and refuses: the lease will run out
            del self._unfenced[0]

    def _bury(self, process: WorkerProcess) -> None:
        self._epoll.unregister(process.pidfd)
        trouble = ""
        try:
            self._fence(self._ledger, process.worker)  # first: the others wait for this
        except (HoldfastError, OSError) as error:
            trouble = str(error).partition("\n")[0]
            self._unfenced.append(process.worker)
        code, number = process.reap()
        process.close()
        self._report(process, code, number, trouble)
        try:
            self._tidy(self._ledger)
        except (HoldfastError, OSError):
            pass  # next time


def allow_open_files(workers: int) -> None:
    """A process and two connections for each worker: the usual limit of 1024 does not do for hundreds."""
    wanted = 256 + 8 * workers
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, limit), hard))


def fence_worker(ledger: Ledger, worker: str) -> bool:
    """Take a dead worker's registration out of the ledger, and say that it is dead and not just silent.

    The registration goes first: the others go on when they see that. Without state they wait for the second.
    False if there was no registration.
    """
    entry = ledger.get(KEY_WORKERS + worker)
    if entry is not None:
        if entry.lease:
            ledger.revoke(entry.lease)
        else:
            ledger.delete(entry.key)
    ledger.put(KEY_DEAD + worker, b"{}")
    return entry is not None


def forget_the_long_dead(ledger: Ledger) -> None:
    """Keep the ledger small: only who is in the view can be missed."""
    dead = ledger.read(KEY_DEAD).entries
    if len(dead) <= DEAD_MAX:
        return
    view = ledger.get(KEY_VIEW)
    members = View.decode(view.value).members if view is not None else ()
    for entry in sorted(dead, key=lambda entry: entry.revision)[: -DEAD_MAX // 2]:
        if entry.key[len(KEY_DEAD) :] not in members:
            ledger.delete(entry.key)
