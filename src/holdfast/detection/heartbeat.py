"""The heart of a worker: what its training thread is in, looked at and written down ten times a second.

Threads: the training thread calls `Pulse.enter`, which sets a few attributes and makes no system call. The thread
`holdfast-heartbeat` alone touches the page and the histories. It looks at the training thread from outside: the
kernel's account of its processor time, and the lines that it is in.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from holdfast.core.waits import Wait
from holdfast.detection.beat import Activity, Beat
from holdfast.detection.pages import PAGE_BYTES, STEP_AT, Note, note_path
from holdfast.detection.phi import Intervals

BEAT_S = 0.1
MOVED_CPU_S = 0.01  # a wait that only looks at its clock now and then takes far less in the same time
FRAMES_MAX = 16
JOIN_S = 5.0
UNCOUNTED_MAX = 4096
STACKS_SIGNAL = int(signal.SIGRTMIN) + 9  # of those that nobody else uses; SIGUSR1 and 2 are for schedulers and scripts


class Pulse:
    """What the training thread is in. It alone writes here, but for `finished`, from which the heart takes."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.activity = Activity.STARTING
        self.step = 0
        self.entered = 0
        self.since = clock()
        self.thread = threading.get_ident()
        self.native = threading.get_native_id()
        self.finished: deque[tuple[Activity, float]] = deque(maxlen=UNCOUNTED_MAX)
        self.note_step: memoryview | None = None  # where the step is noted at once: a beat may be the last before death
        self.wait: Wait | None = None  # what it waits for, once it has waited for a moment

    def enter(self, activity: Activity, step: int) -> None:
        now = self.clock()
        self.finished.append((self.activity, now - self.since))
        self.since = now
        self.activity = activity
        if step != self.step:
            self.step = step
            if self.note_step is not None:
                self.note_step[0] = step
        self.wait = None
        self.entered += 1  # last: who reads in between takes the old number for the new thing, and looks again

    def adopt(self) -> None:
        """The calling thread is the one that trains."""
        self.thread = threading.get_ident()
        self.native = threading.get_native_id()


class Heartbeat:
    """Beats until it is closed. Raises OSError if the system has no page for it."""

    def __init__(self, pulse: Pulse, run_dir: Path, worker: str, *, started: int) -> None:
        self._pulse = pulse
        self._path = note_path(run_dir, worker)
        self._process = os.getpid()
        self._page_file = os.memfd_create("holdfast-beats")
        os.ftruncate(self._page_file, PAGE_BYTES)
        self._page = mmap.mmap(self._page_file, PAGE_BYTES)
        self._pulse.note_step = memoryview(self._page)[STEP_AT : STEP_AT + 8].cast("q")
        self._pulse.note_step[0] = self._pulse.step
        self._stacks = os.memfd_create("holdfast-stacks")
        self._signal = self._offer_stacks()
        self._histories = {activity: Intervals() for activity in Activity}
        self._pace = Intervals()
        self._number = 0
        self._at = time.monotonic()
        self._entered = -1
        self._lines: tuple[int, ...] = ()
        self._cpu_s = 0.0
        self._moved_at = self._at
        self._stopping = threading.Event()
        self._beat()
        Note(pid=self._process, started=started, page=self._page_file, stacks=self._stacks, signal=self._signal).write(
            self._path
        )
        self._thread = threading.Thread(target=self._run, name="holdfast-heartbeat", daemon=True)
        self._thread.start()

    def _offer_stacks(self) -> int:
        """The signal upon which all threads' stacks are written; 0 if the script has another use for it."""
        if signal.getsignal(STACKS_SIGNAL) != signal.SIG_DFL:
            return 0
        try:
            faulthandler.register(STACKS_SIGNAL, file=self._stacks, all_threads=True)
        except (OSError, RuntimeError, ValueError):
            return 0
        return STACKS_SIGNAL

    def close(self) -> None:
        """The last beat says so: a worker may take its time to end, to write its last checkpoint for one."""
        if os.getpid() != self._process or self._stopping.is_set():
            return  # a child that the script forked
        self._pulse.enter(Activity.CLOSED, self._pulse.step)
        self._stopping.set()
        self._thread.join(timeout=JOIN_S)
        if not self._thread.is_alive():
            self._beat()
        self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        try:
            while not self._stopping.wait(max(0.0, self._at + BEAT_S - time.monotonic())):
                self._beat()
        except BaseException:
            # No memory for a thread's frames, say. A heart that broke is no reason to end the worker.
            self._write(Beat(number=self._number + 1, at=self._at, activity=Activity.CLOSED))
            raise

    def _beat(self) -> None:
        now = time.monotonic()
        if self._number:
            self._pace.add(now - self._at)
        self._at = now
        self._number += 1
        pulse = self._pulse
        entered, activity, since, step = pulse.entered, pulse.activity, pulse.since, pulse.step
        while pulse.finished:
            past, lasted_s = pulse.finished.popleft()
            self._histories[past].add(lasted_s)
        if self._has_moved(entered):
            self._moved_at = now
        beat = Beat(
            number=self._number,
            at=now,
            step=step,
            activity=activity,
            entered=entered,
            since=since,
            moved_at=self._moved_at,
            thread=pulse.thread,
            cost_s=time.thread_time(),
            pace=self._pace.history(),
            usual=self._histories[activity].history(),
            wait=pulse.wait,
        )
        self._write(beat)

    def _write(self, beat: Beat) -> None:
        data = beat.encode()
        self._page[: len(data)] = data

    def _has_moved(self, entered: int) -> bool:
        """Since it was last seen to. What it is in, its processor time, or the lines that it is at."""
        cpu_s, lines = self._processor_time(), self._where()
        moved = entered != self._entered or lines != self._lines or cpu_s - self._cpu_s > MOVED_CPU_S
        if moved:
            self._entered, self._lines, self._cpu_s = entered, lines, cpu_s
        return moved

    def _processor_time(self) -> float:
        # The kernel's name for a thread's clock. Not pthread_getcpuclockid: it is not safe if the thread has ended.
        try:
            return time.clock_gettime((~self._pulse.native << 3) | 6)
        except OSError:
            return self._cpu_s

    def _where(self) -> tuple[int, ...]:
        frame = sys._current_frames().get(self._pulse.thread)
        lines: list[int] = []
        while frame is not None and len(lines) < 2 * FRAMES_MAX:
            lines += (id(frame.f_code), frame.f_lasti)
            frame = frame.f_back
        return tuple(lines)
