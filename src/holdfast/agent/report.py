"""What the agent tells: its events on disk, its sentences on the screen, and how the run ended.

Owned by the agent's main thread.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from holdfast.agent.finishing import unwritten_lines
from holdfast.agent.output.log_times import LogTimes
from holdfast.agent.output.tail import Tails, last_words
from holdfast.agent.policy import RunEnd
from holdfast.agent.repeats import Repeats
from holdfast.agent.settings import RunSettings
from holdfast.core.errors import EXIT_BAD_INPUT, HoldfastError, LedgerRefused
from holdfast.events import EventLog, prune
from holdfast.observe.fold import RunRecord
from holdfast.observe.summary import closing_lines, progress_line, started_over_line, unfinished_line
from holdfast.observe.terminal import Narrator, ProgressClock, Screen
from holdfast.placement.directory import RunDirectory

PRUNE_PERIOD_S = 60.0
LOST_S = 2.0  # without a view that shows whether it is really gone: then it is said
LAST_LOOKS_MAX = 40  # 10 MiB of each log
EXIT_BY_SIGNAL = 128  # and the signal's number


class AgentReporter:
    def __init__(self, settings: RunSettings, directory: RunDirectory, record: RunRecord, screen: Screen) -> None:
        self.record = record
        self.tails = Tails(LogTimes(directory.logs).note)
        self._settings = settings
        self._directory = directory
        self._screen = screen
        self._events = EventLog(directory.events / "agent.jsonl", "agent")
        self._narrator = Narrator()
        self._clock = ProgressClock(redraws=screen.redraws)
        self._refusals: set[str] = set()
        self._repeats = Repeats()
        self._prune_at = 0.0

    def tell(self, kind: str, **fields: Any) -> None:
        """Write an event of our own, and take it at once: a full disk must not make us blind."""
        self._events.write(kind, **fields)
        if self._events.failed and self._events.failed not in self._refusals:
            self._refusals.add(self._events.failed)
            self.say(f"events cannot be written; training goes on: {self._events.failed}")
        self.take({"t": time.time(), "who": "agent", "kind": kind, **fields})

    def take(self, event: Mapping[str, Any]) -> None:
        try:
            sentence = self._narrator.sentence(event, news=self.record.feed(event))
        except (KeyError, TypeError, ValueError):  # not as the vocabulary says: a newer worker's, or damaged
            return
        if sentence and event["kind"] == "view":
            for lost in self._narrator.losses(members=event.get("members", ())):
                self.say(lost)
        if sentence and event["kind"] == "started_over":
            sentence = started_over_line(self.record, keeps=bool(event.get("keeps")))
        if sentence:
            self.say(sentence)
        if event["kind"] == "failed" and (again := self._repeats.take(event)):
            self.warn(again)

    def say(self, text: str) -> None:
        self._screen.line(f"holdfast | {text}")

    def warn(self, text: str) -> None:
        self.tell("warning", text=text)

    def refused(self, error: HoldfastError | OSError) -> None:
        """The ledger or the disk said no. It is said once."""
        text = str(error).partition("\n")[0]
        if text not in self._refusals:
            self._refusals.add(text)
            what = "the ledger takes no writes" if isinstance(error, LedgerRefused) else "a write failed"
            self.warn(f"{what}{'' if self.record.finished else '; training goes on'}: {text}")

    def ended(self, worker: str, now: float, *, failed: bool) -> None:
        """Show what it said last, but for a traceback that may be the last word of the whole run."""
        self.tails.end(worker, failed=failed)
        for line in self.tails.last_lines(worker, now):
            self._screen.line(f"{worker} | {line}")

    def look(self, now: float, *, workers: int) -> None:
        """Show what the workers have written since, and the progress where it is due."""
        if now >= self._prune_at:
            self._prune_at = now + PRUNE_PERIOD_S
            with suppress(OSError):
                living = [who for who, known in self.record.workers.by_id.items() if known.alive]
                prune(self._directory.events, [*living, *self.record.servers.alive])
        for lost in self._narrator.losses(until=time.time() - LOST_S):
            self.say(lost)
        for worker, line in self.tails.look(now):
            self._screen.line(f"{worker} | {line}")
        if self.record.step:
            line = progress_line(self.record, workers=self.record.training or workers)
            if self._clock.due(line, now):
                self._screen.progress(line if self._screen.redraws else f"holdfast | {line}")

    def finished(self, *, exit_code: int, written: bool = True) -> None:
        """`written`: the ledger says so, too."""
        for line in closing_lines(self.record, self._settings.name):
            self.say(line)
        for line in () if written else unwritten_lines(self._settings.name):
            self.say(line)
        finished = self.record.finished
        if finished is None:  # nobody came to the end of the script
            return
        step = finished.get("step", self.record.step)
        self.tell("run_finished", step=step, digest=finished.get("digest"), exit_code=exit_code, in_ledger=written)

    def conclude(self, end: RunEnd, *, written: bool = True) -> None:
        """Everything that is still to be shown, and how the run ended."""
        if end.outcome == "failed":
            for line in self.tails.drop_withheld(end.worker):
                self._screen.line(f"{end.worker} | {line}")
        self.tails.failures_matter = False
        for _ in range(LAST_LOOKS_MAX):
            self.look(time.monotonic(), workers=0)
            if not self.tails:
                break
        step, name = self.record.step, self._settings.name
        if self._settings.only_serves and not step:
            self.say(_served_line(name, end))
        elif end.outcome == "finished":
            self.finished(exit_code=end.exit_code, written=written)
        elif end.outcome == "stopped":
            self.say(f"run {name} is stopped at step {step} ({end.reason})")
        elif end.outcome in ("unsaved", "cut short"):
            self.say(unfinished_line(self.record, name))
        elif end.outcome == "left" and step:
            self.say(f"every worker left in order, the last at step {step}; the training is not finished")
        elif end.outcome == "left":
            self.say("the script ended in every worker without a step of training")
        self.tell("agent_stopped", reason=end.reason or end.outcome, exit_code=end.exit_code)
        if end.worker:
            self._screen.close()
            self._explain(end)

    def _explain(self, end: RunEnd) -> None:
        """One worker's last words stand for all. Bad input is answered by the script's own sentence alone."""
        words = last_words(self._directory.logs / f"{end.worker}.log")
        bad_input = end.exit_code == EXIT_BAD_INPUT and bool(words)
        if not bad_input:
            print(f"holdfast: {end.reason}", file=sys.stderr)
            if words:
                print(f"{end.worker} said:", file=sys.stderr)
        for line in words:
            print(line, file=sys.stderr)
        if not bad_input:
            print(f"  hint: all output is in {self._directory.logs}", file=sys.stderr)

    def close(self) -> None:
        self._events.close()
        self._screen.close()


def _served_line(name: str, end: RunEnd) -> str:
    """Of a host that only served, which knows of no step."""
    if end.outcome == "finished":
        return f"run {name} is finished; this host has served it to the end"
    if end.outcome == "stopped" and end.exit_code > EXIT_BY_SIGNAL:
        return f"this host has left run {name} ({end.reason})"
    return f"run {name} is {end.outcome} ({end.reason})" if end.reason else f"run {name} is {end.outcome}"
