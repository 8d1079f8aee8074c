"""What a worker's runtime asks of the system that it runs on: time, threads, and waiting. A port.

Everything in a worker that waits, waits through one of these, and so does everything that looks at the clock to decide
something. The simulator (tests/harness/runtime) has one whose time is virtual and whose threads take turns.
"""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Callable
from typing import Protocol


class Running(Protocol):
    """A thread that was started."""

    def join(self, timeout: float | None = None) -> None: ...

    def is_alive(self) -> bool: ...


class Poll(Protocol):
    """As `select.poll` has it, for the sockets and the mailbox of one worker."""

    def register(self, fd: int, eventmask: int = ..., /) -> None: ...

    def modify(self, fd: int, eventmask: int, /) -> None: ...

    def unregister(self, fd: int, /) -> None: ...

    def poll(self, timeout: float | None = None, /) -> list[tuple[int, int]]: ...


class Kernel(Protocol):
    def now(self) -> float:
        """Seconds of a clock that never goes back."""

    def sleep(self, seconds: float) -> None: ...

    def start(self, name: str, run: Callable[[], object]) -> Running:
        """A thread beside the caller's. It does not keep the process alive."""

    def event(self) -> threading.Event: ...

    def condition(self) -> threading.Condition: ...

    def poll(self) -> Poll: ...


class SystemKernel:
    """This machine's."""

    now = staticmethod(time.monotonic)
    sleep = staticmethod(time.sleep)
    event = staticmethod(threading.Event)
    condition = staticmethod(threading.Condition)
    poll = staticmethod(select.poll)

    def start(self, name: str, run: Callable[[], object]) -> Running:
        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread


SYSTEM: Kernel = SystemKernel()
