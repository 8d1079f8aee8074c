"""How an agent ends: what is written down of a finished run, what is cleared away, and the exit code.

Belongs to the agent's main thread.
"""

from __future__ import annotations

import queue
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from holdfast.agent.finishing import FinishNote
from holdfast.agent.ledgers import StartPatience
from holdfast.agent.leftovers import forget_memory
from holdfast.agent.policy import RunEnd
from holdfast.agent.report import AgentReporter
from holdfast.checkpoint.host_memory.place import remove_memory
from holdfast.core.errors import EXIT_INEXACT, LedgerError
from holdfast.ledger.port import Ledger
from holdfast.observe.summary import inexact_because
from holdfast.placement.directory import RunDirectory


@dataclass(eq=False)
class AgentEnding:
    _directory: RunDirectory
    _socket_dir: Path
    _memory: Path
    _ledger: Ledger
    _finish_note: FinishNote
    _reporter: AgentReporter
    _inbox: queue.SimpleQueue[Any]

    def was_before(self, patience: StartPatience) -> bool:
        """Whether the training is over already. If it is to go on from its end, the ledger no longer says finished."""
        done, record = patience.ask(self._finish_note.value), self._reporter.record
        if record.finished is not None and (done is None or not record.reported):
            return True
        if done is not None:
            self._reporter.say(self._finish_note.take_back(done, self._directory.name))
        return False

    def report_unattended(self) -> int:
        """The training ended while no agent was there to say so."""
        when = "before" if self._reporter.record.reported else "while no agent was running"
        self._reporter.say(f"the training finished {when}")
        remove_memory(self._memory)
        code = self._write_down(0)
        self._reporter.finished(exit_code=code, written=self._finish_note.written)
        self._directory.remove_sockets(self._socket_dir)
        return code

    def write_early(self) -> None:
        """The last step is made: write that down as soon as the ledger takes it."""
        record = self._reporter.record
        if record.finished is not None and self._finish_note.due:
            with suppress(LedgerError):  # a worker may not have reached it either; `settle` tells
                self._finish_note.write(record)

    def conclude(self, end: RunEnd, *, workers_left: int) -> int:
        """The exit code."""
        forget_memory(self._memory, self._ledger, finished=end.outcome == "finished")
        if end.outcome == "finished":
            end = replace(end, exit_code=self._write_down(end.exit_code))
        self._reporter.conclude(end, written=self._finish_note.written)
        if not workers_left:
            self._directory.remove_sockets(self._socket_dir)
        return end.exit_code

    def _write_down(self, code: int) -> int:
        if inexact_because(self._reporter.record):
            code = code or EXIT_INEXACT
        return self._finish_note.settle(code, self._reporter.record, self._inbox, self._reporter.say)
