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

from holdfast.launch.stacks import first_line_of_code
from holdfast.launch.summary import count, slow_sentence

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

    def __init__(self) -> None:
        self._view = -1
        self._lost: set[str] = set()
        self._recovered = -1
        self._ledger_down = False
        self._unsaved: set[str] = set()  # who said that storage is away
        self._saved = False
        self._rewinds = 0
        self._skipped = -1

    def sentence(self, event: Mapping[str, Any]) -> str:
        """The sentence for an event, or "" where there is nothing new to say."""
        handler = getattr(self, f"_on_{event['kind']}", None)
        return "" if handler is None else str(handler(event))

    def _on_worker_started(self, event: Mapping[str, Any]) -> str:
        return f"{event.get('worker')} started (process {event.get('pid')})"

    def _on_worker_exited(self, event: Mapping[str, Any]) -> str:
        code, number = event.get("exit_code"), event.get("signal")
        how = f", signal {number}" if number else f", exit code {code}" if code else ""
        return f"{event.get('worker')} ended: {event.get('reason')}{how}"

    def _on_hung(self, event: Mapping[str, Any]) -> str:
        at = first_line_of_code(str(event.get("stacks", "")))
        return f"{event.get('worker')} hangs: {event.get('reason')}" + (f"; it is at {at}" if at else "")

    def _on_host_silent(self, event: Mapping[str, Any]) -> str:
        return f"host {event.get('host')} is silent: no heartbeat for {event.get('seconds')} s"

    def _on_host_back(self, event: Mapping[str, Any]) -> str:
        return f"host {event.get('host')} beats again, after {event.get('seconds')} s"

    def _on_host_given_up(self, event: Mapping[str, Any]) -> str:
        return f"the workers of host {event.get('host')} are given up: {event.get('reason')}"

    def _on_view(self, event: Mapping[str, Any]) -> str:
        number = int(event.get("view", 0))
        if number <= self._view:
            return ""
        self._view = number
        members = event.get("members", ())
        reason = event.get("reason")
        return f"view {number}: {', '.join(map(str, members))}" + (f" ({reason})" if reason else "")

    def _on_lost(self, event: Mapping[str, Any]) -> str:
        peer = str(event.get("peer"))
        if peer in self._lost:
            return ""
        self._lost.add(peer)
        return f"{peer} lost at step {event.get('step')}: {event.get('reason')}"

    def _on_recovered(self, event: Mapping[str, Any]) -> str:
        view = int(event.get("view", 0))
        if view <= self._recovered:
            return ""
        self._recovered = view
        return f"training goes on at step {event.get('step')}, {float(event.get('duration_s', 0)) * 1000:.0f} ms later"

    def _on_joined(self, event: Mapping[str, Any]) -> str:
        return f"{event['who']} joined at step {event.get('step')}"

    def _on_caught_up(self, event: Mapping[str, Any]) -> str:
        behind = count(int(event["behind"]), "step")
        return f"{event['who']} was late and is back, {behind} later"

    def _on_evicted(self, event: Mapping[str, Any]) -> str:
        return f"{event['who']} was evicted: {event.get('reason')}"

    def _on_corruption(self, event: Mapping[str, Any]) -> str:
        what = (event.get("step"), event.get("where"), event.get("decided"))
        if what == self._corruption:
            return ""  # every member tells
        self._corruption = what
        liars = ", ".join(map(str, event.get("liars") or ()))
        found = f"{liars} is wrong" if liars else "workers disagree"
        return f"corruption at step {event.get('step')}, {event.get('where')}: {found} ({event.get('decided')})"

    _corruption: tuple[Any, ...] = ()

    def _on_ledger_down(self, event: Mapping[str, Any]) -> str:
        said, self._ledger_down = self._ledger_down, True
        if said:
            return ""
        return (
            f"{event['who']} cannot reach the ledger; the membership is frozen, training goes on: {event.get('reason')}"
        )

    def _on_ledger_up(self, event: Mapping[str, Any]) -> str:
        said, self._ledger_down = self._ledger_down, False
        return "the ledger is back" if said else ""

    def _on_checkpoint(self, event: Mapping[str, Any]) -> str:
        """The first is said; of the later ones the progress line tells."""
        said, self._saved = self._saved, True
        if said:
            return ""
        megabytes = float(event.get("bytes", 0)) / 1e6
        return f"step {event.get('step')} is saved to {event.get('uri')} ({megabytes:,.1f} MB)"

    def _on_resumed(self, event: Mapping[str, Any]) -> str:
        return f"training resumes at step {event.get('step')}, from {event.get('uri')}"

    def _on_rewound(self, event: Mapping[str, Any]) -> str:
        number = int(event.get("number", 0))
        if number <= self._rewinds:
            return ""
        self._rewinds, self._skipped = number, -1
        passed = ", ".join(map(str, event.get("passed", ())))
        what = f" and passes step {passed}" if passed else ""
        return f"the run goes back to step {event.get('step')} or before{what}: {event.get('reason')}"

    def _on_skipped(self, event: Mapping[str, Any]) -> str:
        step = int(event.get("step", 0))
        if step <= self._skipped:
            return ""
        self._skipped = step
        return f"step {step} is skipped: {event.get('reason')}"

    def _on_storage_down(self, event: Mapping[str, Any]) -> str:
        said = bool(self._unsaved)
        self._unsaved.add(str(event["who"]))
        if said:
            return ""
        return (
            f"{event['who']} cannot save to {event.get('uri')}; training goes on, "
            f"the newest snapshot waits in memory: {event.get('reason')}"
        )

    def _on_storage_up(self, event: Mapping[str, Any]) -> str:
        if str(event["who"]) not in self._unsaved:
            return ""
        self._unsaved.discard(str(event["who"]))
        return "" if self._unsaved else "storage is back"

    def _on_slow(self, event: Mapping[str, Any]) -> str:
        return f"{event.get('worker')} is slow: {slow_sentence(event)}"

    def _on_no_longer_slow(self, event: Mapping[str, Any]) -> str:
        return f"{event.get('worker')} is no longer slow"

    def _on_waiting(self, event: Mapping[str, Any]) -> str:
        return f"{event['who']} is paused at step {event.get('step')}: {event.get('reason')}"

    def _on_warning(self, event: Mapping[str, Any]) -> str:
        return f"{event['who']} warns: {event.get('text')}"

    def _on_failed(self, event: Mapping[str, Any]) -> str:
        return f"{event['who']} failed: {event.get('reason')}"


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
