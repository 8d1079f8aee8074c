"""Who drives an exchange: one thread at a time.

That is the thread that waits for a result, if one does, so that a result needs no change of threads. While nobody waits
and something is outstanding, it is `holdfast-exchange`, which gives the wheel to whoever wants it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

WAIT_S = 0.5  # a driver looks around at least this often
TAKE_OVER_S = 0.0005  # the thread leaves a script that waits for one result after the other to itself


class Wheel:
    """`drive` hears what there is, and carries it out; `wait` is for something to hear, `wake` ends a wait."""

    def __init__(
        self,
        *,
        drive: Callable[[], None],
        wait: Callable[[float], None],
        wake: Callable[[], None],
        outstanding: Callable[[], bool],
    ) -> None:
        self._drive = drive
        self._wait = wait
        self._wake = wake
        self._outstanding = outstanding
        self._driving = threading.Lock()
        self._wanted = 0  # threads that wait for it
        self._something = threading.Event()
        self._thread: threading.Thread | None = None
        self._closed = False

    def take_if_free(self, within_s: float = 0.0) -> bool:
        return self._driving.acquire(timeout=within_s) if within_s else self._driving.acquire(blocking=False)

    def take(self, unless: Callable[[], bool] = lambda: False) -> bool:
        """As soon as whoever has it lets go. False: another thread has brought this to its end meanwhile."""
        if self._driving.acquire(blocking=False):
            return True
        self._wanted += 1
        try:
            self._wake()
            while not unless():
                if self._driving.acquire(timeout=0.05):
                    return True
            return False
        finally:
            self._wanted -= 1

    def let_go(self) -> None:
        self._driving.release()

    def leave_to_thread(self) -> None:
        """Something is outstanding, and nobody waits for it."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="holdfast-exchange", daemon=True)
            self._thread.start()
        self._something.set()

    def _run(self) -> None:
        while not self._closed:
            self._something.wait()
            self._something.clear()
            time.sleep(TAKE_OVER_S)
            while self._outstanding() and not self._closed and not self._wanted:
                if not self.take_if_free():
                    break  # a script drives, and wakes this thread when something is left
                try:
                    self._drive()
                    if self._outstanding() and not self._wanted:
                        self._wait(WAIT_S)
                finally:
                    self.let_go()

    def stop(self) -> None:
        """The thread is to come to its end."""
        self._closed = True
        self._something.set()
        self._wake()

    def join(self, timeout_s: float) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
