"""What the agent prints: labelled lines of the workers, one line for each noteworthy event, and the progress.

On a terminal the progress is one line, redrawn in place; elsewhere it is a plain line every few seconds. A thread
of its own writes, from a bounded queue: a terminal that is held (Ctrl-S) or a pipe that nobody reads holds up
nothing but the output.
"""

from __future__ import annotations

import os
import queue
import shutil
import threading
from collections.abc import Mapping
from typing import Any, TextIO

from holdfast.events.telling import count, sentence

LINES_MAX = 10_000
PROGRESS_PERIOD_S = 5.0
_CLEAR = "\r\x1b[2K"


class Screen:
    """Accepts lines from any thread and writes them from its own."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self.redraws = out.isatty()
        self._queue: queue.Queue[tuple[str, str]] = queue.Queue(LINES_MAX)
        self._dropped = 0
        self._progress = ""
        self._thread = threading.Thread(target=self._run, name="holdfast-screen", daemon=True)
        self._thread.start()

    def line(self, text: str) -> None:
        self._put("line", text)

    def progress(self, text: str) -> None:
        self._put("progress", text)

    def close(self, timeout_s: float = 2.0) -> None:
        """Write what waits, for at most `timeout_s`."""
        try:
            self._queue.put(("close", ""), timeout=timeout_s)
        except queue.Full:
            return
        self._thread.join(timeout=timeout_s)

    def _put(self, kind: str, text: str) -> None:
        try:
            self._queue.put_nowait((kind, text))
        except queue.Full:
            self._dropped += 1

    def _run(self) -> None:
        while True:
            kind, text = self._queue.get()
            try:
                if kind == "close":
                    self._write(_CLEAR if self._progress else "")
                    return
                self._show(kind, text)
            except (OSError, ValueError):  # nobody reads any more: the logs and events are on disk
                _silence(self._out)
                return

    def _show(self, kind: str, text: str) -> None:
        if kind == "progress" and self.redraws:
            self._progress = text[: shutil.get_terminal_size().columns - 1]
            self._write(_CLEAR + self._progress)
            return
        if self._dropped:
            text += f"\nholdfast: {count(self._dropped, 'line')} of output left out; see the logs"
            self._dropped = 0
        if self._progress:
            self._write(f"{_CLEAR}{text}\n{self._progress}")
        else:
            self._write(f"{text}\n")

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def _silence(out: TextIO) -> None:
    """What waits in the stream's buffer would raise once more when the interpreter ends."""
    try:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, out.fileno())
        os.close(nowhere)
    except (OSError, ValueError):
        pass


class Narrator:
    """Turns events into sentences. Every survivor tells of the same thing: it is said once."""

    # Of these there is something to say each time; the methods below know what was said before.
    ALWAYS = (
        *("worker_started", "worker_exited", "hung", "joined", "evicted", "resumed"),
        *("slow", "no_longer_slow", "waiting", "warning", "failed"),
    )

    def __init__(self) -> None:
        self._view = -1
        self._lost: set[str] = set()
        self._recovered = -1
        self._ledger_down = False
        self._unsaved: set[str] = set()  # who said that storage is away
        self._saved = False
        self._rewinds = 0
        self._skipped = -1
        self._corruption: tuple[Any, ...] = ()

    def sentence(self, event: Mapping[str, Any]) -> str:
        """The sentence for an event, or "" where there is nothing new to say."""
        is_news = getattr(self, f"_on_{event['kind']}", None)
        news = event["kind"] in self.ALWAYS if is_news is None else is_news(event)
        return sentence(event) if news else ""

    def _on_view(self, event: Mapping[str, Any]) -> bool:
        before, self._view = self._view, max(self._view, int(event.get("view", 0)))
        return self._view > before

    def _on_lost(self, event: Mapping[str, Any]) -> bool:
        peer = str(event.get("peer"))
        said = peer in self._lost
        self._lost.add(peer)
        return not said

    def _on_recovered(self, event: Mapping[str, Any]) -> bool:
        before, self._recovered = self._recovered, max(self._recovered, int(event.get("view", 0)))
        return self._recovered > before

    def _on_corruption(self, event: Mapping[str, Any]) -> bool:
        before = self._corruption
        self._corruption = (event.get("step"), event.get("where"), event.get("decided"))
        return self._corruption != before  # every member tells

    def _on_ledger_down(self, event: Mapping[str, Any]) -> bool:
        said, self._ledger_down = self._ledger_down, True
        return not said

    def _on_ledger_up(self, event: Mapping[str, Any]) -> bool:
        said, self._ledger_down = self._ledger_down, False
        return said

    def _on_checkpoint(self, event: Mapping[str, Any]) -> bool:
        """The first is said; of the later ones the progress line tells."""
        said, self._saved = self._saved, True
        return not said

    def _on_rewound(self, event: Mapping[str, Any]) -> bool:
        number = int(event.get("number", 0))
        if number <= self._rewinds:
            return False
        self._rewinds, self._skipped = number, -1
        return True

    def _on_skipped(self, event: Mapping[str, Any]) -> bool:
        before, self._skipped = self._skipped, max(self._skipped, int(event.get("step", 0)))
        return self._skipped > before

    def _on_storage_down(self, event: Mapping[str, Any]) -> bool:
        said = bool(self._unsaved)
        self._unsaved.add(str(event["who"]))
        return not said

    def _on_storage_up(self, event: Mapping[str, Any]) -> bool:
        said = str(event["who"]) in self._unsaved
        self._unsaved.discard(str(event["who"]))
        return said and not self._unsaved


class ProgressClock:
    """When a progress line is due: at every look on a terminal, else when it changed and 5 s have passed."""

    def __init__(self, *, redraws: bool) -> None:
        self._period_s = 0.0 if redraws else PROGRESS_PERIOD_S
        self._next = 0.0
        self._last = ""

    def due(self, text: str, now: float) -> bool:
        if text == self._last or now < self._next:
            return False
        self._last, self._next = text, now + self._period_s
        return True
