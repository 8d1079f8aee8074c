"""Signals to the agent, turned into messages for its inbox."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Interrupted:
    number: int


class Signals:
    """Belongs to the main thread, where handlers run."""

    def __init__(self, post: Callable[[Interrupted], None]) -> None:
        self._post = post
        self._before: dict[int, Any] = {}

    def catch(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):  # SIGUSR1: the usual notice on Slurm
            self._before[number] = signal.signal(number, lambda number, _frame: self._post(Interrupted(number)))
        # Inherited as ignored, it would take our children's exit codes away.
        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, signal.SIG_DFL)

    def restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
