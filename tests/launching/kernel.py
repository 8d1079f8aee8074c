"""A real Jupyter kernel, as a notebook has one: cells are sent to it one after the other, and it can be interrupted."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DEADLINE_S = 600.0


class Kernel:
    """Ended with the block."""

    def __init__(self, directory: Path) -> None:
        from jupyter_client.manager import start_new_kernel

        self._manager, self._client = start_new_kernel(kernel_name="python3", cwd=str(directory))
        self.printed = ""  # by the last cell
        self.shown: list[str] = []  # what the last cell displayed, as plain text, each newer state included

    def __enter__(self) -> Kernel:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.stop_channels()
        self._manager.shutdown_kernel(now=True)
        self._manager.cleanup_resources()

    def interrupt(self) -> None:
        """What the notebook's stop button does."""
        self._manager.interrupt_kernel()

    def run(self, cell: str, meanwhile: Callable[[], bool] = lambda: True) -> str:
        """Run a cell to its end; the name of the exception that it ended with, or nothing. `meanwhile` is called again
        and again, until it says that it is done."""
        self.printed, self.shown, done = "", [], False
        number, deadline = self._client.execute(cell), time.monotonic() + DEADLINE_S
        error = ""
        while time.monotonic() < deadline:
            done = done or meanwhile()
            try:
                message: dict[str, Any] = self._client.get_iopub_msg(timeout=0.1)
            except queue.Empty:
                continue
            if message["parent_header"].get("msg_id") != number:
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                self.printed += content["text"]
            elif kind in ("display_data", "update_display_data", "execute_result"):
                self.shown.append(content["data"]["text/plain"])
            elif kind == "error":
                error = content["ename"]
                self.printed += "\n".join(content["traceback"])
            elif kind == "status" and content["execution_state"] == "idle":
                return error
        raise TimeoutError(f"a cell has not ended after {DEADLINE_S:g} s; it printed {self.printed}")
