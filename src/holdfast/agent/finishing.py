"""That a run is finished must stand in its ledger before its agents end: a host that comes later reads nothing else,
and would train it again.

Belongs to the agent's main thread.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from holdfast.agent.ledger_watch import LedgerAway, LedgerBack, LedgerContents
from holdfast.agent.signals import Interrupted
from holdfast.checkpoint.host_memory.place import MEMORY_ONLY
from holdfast.core.errors import EXIT_UNWRITTEN, ConfigError, LedgerError
from holdfast.core.words import KEY_CHECKPOINT, KEY_DONE, KEY_WORKERS, decode_json, encode_json
from holdfast.ledger.port import Ledger
from holdfast.observe.fold import RunRecord

TRY_AGAIN_S = 5.0  # a ledger that answers and takes no writes does not say when it does again


class FinishNote:
    """Whether the ledger says that the run is finished; writes it there."""

    def __init__(self, ledger: Ledger, size_key: str, *, wait_s: float | None) -> None:
        """`wait_s`: so long the agent stays at the end for a ledger that is away. None: the run is on one host, where
        the run's own directory says it, too."""
        self._wait_s = wait_s
        self._size_key = size_key  # where it stands how many workers this host is to have
        self.written = False  # by whomever
        self.due = True  # it has not been tried since the ledger was last heard of
        self._ledger = ledger
        self._away = ""  # why it does not answer

    def heard(self, message: object) -> None:
        """What the watch over the ledger says of it."""
        if isinstance(message, LedgerAway):
            self._away = message.reason
        elif isinstance(message, LedgerBack | LedgerContents):
            self._away, self.due = "", True

    def value(self) -> dict[str, Any] | None:
        """What the ledger says of the end; None: that it is not there."""
        entry = self._ledger.get(KEY_DONE)
        self.written = entry is not None
        return None if entry is None else decode_json(entry.value)

    def write(self, record: RunRecord) -> None:
        """Once, if nobody has done it. LedgerError if that cannot be."""
        self.due = False
        if not self.written and self.value() is None:
            finished = record.finished or {}
            self._ledger.put(KEY_DONE, encode_json({"step": finished.get("step"), "digest": finished.get("digest")}))
        self.written = True

    def _note_checkpoint(self, record: RunRecord) -> None:
        """The worker that saved last may not have reached the ledger either, and whoever goes on asks there for it."""
        if record.saved is None or record.saved_to in ("", MEMORY_ONLY):
            return
        entry = self._ledger.get(KEY_CHECKPOINT)
        known = decode_json(entry.value).get("step") if entry is not None else None
        if not isinstance(known, int) or known < record.saved:
            self._ledger.put(KEY_CHECKPOINT, encode_json({"step": record.saved, "uri": record.saved_to}))

    def take_back(self, done: Mapping[str, Any], name: str) -> str:
        """The run is started again, and goes on if its script has more steps. What to say; ConfigError if it cannot."""
        step = done.get("step")
        if self._ledger.read(KEY_WORKERS).entries:
            raise ConfigError(
                f"run {name} is finished (step {step}), and workers of other hosts are just ending it",
                hint="give the same command again when they have ended: it goes on if the script has more steps",
            )
        entry = self._ledger.get(KEY_CHECKPOINT)
        if entry is None or decode_json(entry.value).get("uri") == MEMORY_ONLY:
            raise ConfigError(
                f"run {name} is finished (step {step}), and kept no checkpoint to go on from",
                hint="choose another name with --run NAME",
            )
        self._ledger.delete(KEY_DONE)
        self.written, self.due = False, True
        return f"run {name} was finished, at step {step}: it goes on if the script has more steps than that"

    def settle(self, code: int, record: RunRecord, inbox: queue.SimpleQueue[Any], say: Callable[[str], None]) -> int:
        """Before the agent ends. Its exit code, which is `code` if the ledger says that the run is finished."""
        if record.finished is None:
            self.written = True  # nobody has finished in order: there is nothing to write
        elif self._wait_s is None:
            self._try(record)
            self.written = True
        else:
            self._stay(record, inbox, say, self._wait_s)
            if self.written:
                with suppress(LedgerError):
                    self._note_checkpoint(record)
                    self._ledger.delete(self._size_key)  # nobody comes from here: who goes on shall not wait for it
        return code if self.written else code or EXIT_UNWRITTEN

    def _stay(
        self, record: RunRecord, inbox: queue.SimpleQueue[Any], say: Callable[[str], None], wait_s: float
    ) -> None:
        """Until it is written, at most for `wait_s` or until a signal comes."""
        deadline, told = time.monotonic() + wait_s, False
        while True:
            trouble = self._away or self._try(record)
            left_s = deadline - time.monotonic()
            if not trouble or left_s <= 0:
                break
            if not told:
                told = True
                say(
                    f"every step is made, but the ledger does not know it ({trouble}): waiting up to {wait_s:g} s "
                    "to write down that the run is finished, so that no host trains it again; Ctrl-C ends the wait"
                )
            try:
                message = inbox.get(timeout=min(left_s, TRY_AGAIN_S))
            except queue.Empty:
                self._away = ""  # the watch should have said that it is back; better to ask than to miss it
                continue
            if isinstance(message, Interrupted):
                break
            self.heard(message)
        if told and self.written:
            say("the ledger is back, and says that the run is finished")

    def _try(self, record: RunRecord) -> str:
        try:
            self.write(record)
        except LedgerError as error:
            return error.message
        return ""


def unwritten_lines(name: str) -> list[str]:
    """What to say when it could not be written."""
    return [
        f"the ledger does not know that run {name} is finished: a host that comes would go on from the newest "
        "checkpoint, or begin at step 0 if there is none",
        "give the same command again when the ledger answers: it writes it down and trains nothing",
    ]
