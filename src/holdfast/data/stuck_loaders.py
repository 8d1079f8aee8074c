"""Says where loader processes stand when no batch comes for long: most often at a lock that was held at their fork.

A loader process is forked from the worker. A lock that another thread of the worker held at that moment is held in the
copy for ever, since the thread that would release it is not there. The kernel cannot tell this from a slow disk, so
nothing is ended here: the place is named, once, and the agent's watch over hanging workers does the rest.
Owns a memory file, which the loader processes inherit and write their stacks into.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
import warnings
from collections.abc import Sequence
from typing import Final

PATIENCE_S: Final = 20.0  # without a batch
_SIGNAL: Final = signal.SIGUSR2
_ANSWER_S: Final = 2.0
_BYTES_MAX: Final = 1 << 16
_FRAME: Final = re.compile(r'File "([^"]+)", line (\d+) in (\S+)')


class LoaderStacks:
    """A file in memory for the stacks of the loader processes that are forked after this was made."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("holdfast-loader-stacks") if hasattr(os, "memfd_create") else -1
        self._told = False

    def listen(self) -> None:
        """In a loader process, first thing: answer when asked where it stands."""
        if self._descriptor >= 0:
            faulthandler.register(_SIGNAL, file=self._descriptor, all_threads=False, chain=False)

    def tell(self, pids: Sequence[int]) -> None:
        """In the worker: one warning that names the line at which the first of them stands."""
        if self._told or not pids:
            return
        self._told = True
        frames = _FRAME.findall(self._ask(pids[0]))
        where = next((frame for frame in frames if "/torch/" not in frame[0] and "/holdfast/" not in frame[0]), None)
        place = f"at line {where[1]} of {where[0]}, in {where[2]}" if where is not None else "at a place unknown"
        warnings.warn(
            f"no batch has come from the loader processes for {PATIENCE_S:.0f} s; process {pids[0]} stands {place}. If "
            "it waits for a lock there, another thread held it when the process was forked: make the lock in the "
            "dataset's __getitem__ or a worker_init_fn, or use num_workers=0",
            stacklevel=5,
        )

    def _ask(self, pid: int) -> str:
        if self._descriptor < 0:
            return ""
        os.ftruncate(self._descriptor, 0)
        try:
            os.kill(pid, _SIGNAL)
        except ProcessLookupError:
            return ""
        deadline = time.monotonic() + _ANSWER_S
        text = ""
        while time.monotonic() < deadline and not _FRAME.search(text):
            time.sleep(0.02)
            text = os.pread(self._descriptor, _BYTES_MAX, 0).decode(errors="replace")
        return text

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
