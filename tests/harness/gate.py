"""A gate before the steps of a training, so that faults can be placed.

The training calls `wait_at` before each step: it says where it is, and waits while the step is not below the one that
the gate's file names. Workers that are started again wait there too. Whoever holds the gate opens it, further and
further, and sees who has come how far. Without the file everything is open.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

OPEN = 1_000_000


def wait_at(gate: Path | None, worker: str, step: int) -> None:
    """Say where this worker is, and wait until the gate is open."""
    if gate is None:
        return
    gate.with_name(f"at-{worker}").write_text(str(step))
    while gate.exists() and step >= int(gate.read_text() or "0"):
        time.sleep(0.01)


class Gate:
    """Held by one thread of the test. `path` is what the training is given."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.open_below = 0  # the first step that waits

    def open_to(self, step: int = OPEN) -> None:
        self.open_below = step
        partial = self.path.with_suffix(".new")
        partial.write_text(str(step))
        partial.replace(self.path)

    def newest(self) -> int:
        """The newest step that any worker has come to; progress events come too rarely to know."""
        return max((int(path.read_text() or "0") for path in self.path.parent.glob("at-*")), default=0)

    def seen(self, workers: Iterable[str]) -> list[str]:
        """Those that have begun a step, and so have the state: a joiner that still loads cannot go on alone."""
        return [worker for worker in workers if self._place(worker).exists()]

    def at(self, step: int, workers: Iterable[str]) -> list[str]:
        """Those that wait at this step, or compute it."""
        return [worker for worker in self.seen(workers) if self._place(worker).read_text() == str(step)]

    def _place(self, worker: str) -> Path:
        return self.path.with_name(f"at-{worker}")
