"""What changes of the ledger mean to an agent: workers that register or vanish, views, another size, a stop, the end.

Belongs to the agent's main thread.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from holdfast.agent.finishing import FinishNote
from holdfast.agent.ledger_watch import LedgerAway, LedgerBack, LedgerChange, LedgerContents, News
from holdfast.agent.ledgers import attempt
from holdfast.agent.policy import Policy
from holdfast.agent.report import AgentReporter
from holdfast.agent.workers.heartbeat_watch import HeartbeatWatch
from holdfast.agent.workforce import Workforce
from holdfast.core.errors import ProtocolError
from holdfast.core.options.run import WORKERS_MAX
from holdfast.core.words import (
    KEY_DONE,
    KEY_SIZE,
    KEY_STOP,
    KEY_VIEW,
    KEY_WORKERS,
    View,
    decode_whole,
    encode_json,
    host_of,
)
from holdfast.ledger.port import Ledger


@dataclass(eq=False)
class LedgerListener:
    _ledger: Ledger
    _host: str
    _policy: Policy
    _workforce: Workforce
    _heartbeat_watch: HeartbeatWatch
    _reporter: AgentReporter
    _finish_note: FinishNote
    _may_have_workers: bool = True  # it has a script for them

    def __post_init__(self) -> None:
        self.size_key = KEY_SIZE + self._host
        self._handlers: dict[str, Callable[[bytes, float], None]] = {
            self.size_key: self._resized,
            KEY_VIEW: self._viewed,
            KEY_STOP: self._stopped,
            KEY_DONE: self._done,
        }

    def say_size(self) -> None:
        """How many workers this host is to have: who takes members in asks for it."""
        size = encode_json({"workers": self._policy.workers})
        attempt(lambda: self._ledger.put(self.size_key, size), self._reporter.refused)

    def heard(self, news: News, now: float) -> None:
        match news:
            case LedgerAway(reason):
                self._finish_note.heard(news)
                self._reporter.tell("ledger_down", reason=reason)
            case LedgerBack(down_s):
                self._finish_note.heard(news)
                self._reporter.tell("ledger_up", down_s=round(down_s, 3))
            case LedgerChange(change):
                self._changed(change.key, change.value if change.kind == "put" else None, now)
            case LedgerContents(values):
                for worker in self._workforce.missing_from(values):
                    self._changed(KEY_WORKERS + worker, None, now)
                for key, value in values.items():
                    self._changed(key, value, now)
                if self.size_key not in values and not self._policy.stopping and not self._policy.done:
                    self.say_size()  # the ledger was away when it was said

    def _changed(self, key: str, value: bytes | None, now: float) -> None:
        if key.startswith(KEY_WORKERS):
            worker = key[len(KEY_WORKERS) :]
            if host_of(worker) != self._host:
                return  # another agent's
            if value is None:
                self._workforce.unregistered(worker, now)
            else:
                self._workforce.registered(worker, value)
        elif value is not None and key in self._handlers:
            self._handlers[key](value, now)

    def _viewed(self, value: bytes, now: float) -> None:
        with suppress(ProtocolError):
            view = View.decode(value)
            late = [worker for worker, _ in view.late]
            self._heartbeat_watch.viewed(view.members, late)
            self._policy.viewed((member for member in view.members if host_of(member) == self._host), late)

    def _stopped(self, value: bytes, now: float) -> None:
        if not self._policy.stopping and not self._policy.done:
            self._reporter.say("asked to stop: workers finish the step and leave")
            self._policy.stop("asked to stop", 0, now)

    def _done(self, value: bytes, now: float) -> None:
        self._finish_note.written = True
        self._policy.finished(now)

    def _resized(self, value: bytes, now: float) -> None:
        was = self._policy.workers
        try:
            workers = decode_whole(value, "workers")
        except ProtocolError:
            return
        if workers != was and 1 <= workers <= WORKERS_MAX and self._may_have_workers:
            self._policy.resized(workers)
            self._reporter.tell("scaled", workers=workers, was=was)
