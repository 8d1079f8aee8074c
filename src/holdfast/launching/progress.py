"""What a launch shows while it runs: lines, and a bar where it can be redrawn. Three faces of one thing.

In a Jupyter notebook the bar is a part of the cell's output that is replaced in place; on a terminal rich draws it, if
it is installed; anywhere else the agent's own lines tell the progress every few seconds. Belongs to one thread.
"""

from __future__ import annotations

import html
import sys
import time
from typing import Any

from holdfast.observe.fold import RunRecord
from holdfast.observe.summary import progress_line

NOTEBOOK_PERIOD_S = 0.5


class Face:
    """Lines only; also what the others are made of."""

    has_bar = False

    def line(self, text: str) -> None:
        print(text, flush=True)

    def show(self, record: RunRecord) -> None:
        """How far the run is."""

    def close(self) -> None:
        """The bar stays as it is."""


class TerminalFace(Face):
    has_bar = True

    def __init__(self) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = BarColumn(bar_width=30), TextColumn("{task.description}", markup=False), TimeRemainingColumn()
        self._progress = Progress(*columns)
        self._bar: Any = None

    def line(self, text: str) -> None:
        self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show(self, record: RunRecord) -> None:
        if not record.step:
            return
        words = progress_line(record, workers=record.training)
        if self._bar is None:
            self._progress.start()
            self._bar = self._progress.add_task(words, total=record.steps or None)
        self._progress.update(self._bar, completed=record.step, total=record.steps or None, description=words)

    def close(self) -> None:
        self._progress.stop()


class NotebookFace(Face):
    has_bar = True

    def __init__(self) -> None:
        self._handle: Any = None
        self._next = 0.0
        self._shown = ""
        self._record: RunRecord | None = None

    def show(self, record: RunRecord) -> None:
        self._record = record
        if record.step and time.monotonic() >= self._next:
            self._next = time.monotonic() + NOTEBOOK_PERIOD_S
            self._draw(record)

    def close(self) -> None:
        if self._record is not None and self._record.step:
            self._draw(self._record)

    def _draw(self, record: RunRecord) -> None:
        words = progress_line(record, workers=record.training)
        if words == self._shown:
            return
        self._shown = words
        of = f' max="{record.steps}" value="{record.step}"' if record.steps else ""
        page = f'<progress{of} style="width: 20em"></progress> <code>{html.escape(words)}</code>'
        shown = {"text/plain": words, "text/html": page}
        if self._handle is None:
            from IPython.display import display

            self._handle = display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)


def face_for(*, progress: bool) -> Face:
    """The one for where this process writes to."""
    if not progress:
        return Face()
    if _in_notebook():
        return NotebookFace()
    if sys.stdout.isatty():
        try:
            return TerminalFace()
        except ImportError:
            pass
    return Face()


def _in_notebook() -> bool:
    shell = sys.modules.get("IPython")
    found = shell.get_ipython() if shell is not None else None
    return getattr(found, "kernel", None) is not None
