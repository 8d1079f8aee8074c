"""What the agent prints: labelled lines of the workers, one line for each noteworthy event, and the progress.

On a terminal the progress is one line, redrawn in place; elsewhere it is a plain line every few seconds. A thread
of its own writes, from a bounded queue: a terminal that is held (Ctrl-S) or a pipe that nobody reads holds up
nothing but the output.
"""

from __future__ import annotations

import math
import os
import queue
import shutil
import threading
from collections.abc import Iterable, Mapping
from typing import Any, TextIO

from holdfast.events.telling import count, sentence

LINES_MAX = 10_000
RECORDED_PERIOD_S = 5.0
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
    """Turns events into sentences. Every survivor tells of the same thing: it is said once.

    What the record of the run knows to be told by many (observe/recent.py) comes with the word whether it is news.
    """

    # Of these there is something to say each time that they are news; the methods below know what was said before.
    TOLD = (
        *("worker_started", "worker_exited", "hung", "standstill", "joined", "evicted", "resumed"),
        *("slow", "no_longer_slow", "late", "caught_up", "warning", "failed", "script_mistake"),
        *("server_exited", "server_hung", "server_slow", "server_no_longer_slow", "failover", "slices_lost"),
        *("host_silent", "host_back", "host_given_up", "recovered", "corruption", "rewound", "started_over", "skipped"),
        "distrusted",
    )

    def __init__(self) -> None:
        self._view = -1
        self._lost: dict[str, Mapping[str, Any]] = {}  # of whom a member tells that it lost them, until it is sure
        self._said_lost: set[str] = set()
        self._waits: set[str] = set()  # why workers do not get on, since the last view
        self._ledger_down = False
        self._unsaved: set[str] = set()  # who said that storage is away
        self._recorded = (-1, float("-inf"))  # the step and the time of what was said last
        self._once: set[str] = set()  # the kinds that are said once, and were

    def sentence(self, event: Mapping[str, Any], *, news: bool = True) -> str:
        """The sentence for an event, or "" where there is nothing new to say."""
        to_say = getattr(self, f"_on_{event['kind']}", None)
        said = news and (event["kind"] in self.TOLD if to_say is None else to_say(event))
        return sentence(event) if said else ""

    def _on_view(self, event: Mapping[str, Any]) -> bool:
        if event.get("own"):
            return True
        before, self._view = self._view, max(self._view, int(event.get("view", 0)))
        if self._view > before:
            self._waits.clear()
        return self._view > before

    def _on_lost(self, event: Mapping[str, Any]) -> bool:
        """Not at once. Who has lost a peer closes all its connections, and is lost to the others for that reason: the
        next view shows who is really gone."""
        if event.get("peer") not in self._said_lost:
            self._lost.setdefault(str(event.get("peer")), event)
        return False

    def losses(self, *, members: Iterable[str] = (), until: float = math.inf) -> list[str]:
        """Sentences on who is lost, of those told until then; and forget the rest of them: `members` are not."""
        told = [peer for peer, event in self._lost.items() if float(event.get("t", 0.0)) <= until]
        gone = {peer: self._lost.pop(peer) for peer in told}
        lost = [peer for peer in gone if peer not in set(members)]
        self._said_lost.update(lost)
        return [sentence(gone[peer]) for peer in lost]

    def _on_waiting(self, event: Mapping[str, Any]) -> bool:
        said, reason = len(self._waits), str(event.get("reason"))
        self._waits.add(reason)
        return len(self._waits) > said

    def _on_cut_short(self, event: Mapping[str, Any]) -> bool:
        """Every worker tells, of checkpoints each; of later checkpoints the progress line tells."""
        said = str(event["kind"]) in self._once
        self._once.add(str(event["kind"]))
        return not said

    _on_unsaved = _on_inexact = _on_checkpoint = _on_early_stop = _on_cut_short

    def _on_ledger_down(self, event: Mapping[str, Any]) -> bool:
        said, self._ledger_down = self._ledger_down, True
        return not said

    def _on_ledger_up(self, event: Mapping[str, Any]) -> bool:
        said, self._ledger_down = self._ledger_down, False
        return said

    def _on_recorded(self, event: Mapping[str, Any]) -> bool:
        """A new best is always said. A script may record something at every step, so others now and then."""
        step, when = int(event.get("step", 0)), float(event["t"])
        due = step != self._recorded[0] and when - self._recorded[1] >= RECORDED_PERIOD_S
        if event.get("best") or due:
            self._recorded = step, when
        return bool(event.get("best") or due)

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
