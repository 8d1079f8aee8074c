"""Keeps the record of a run up to date, for all who look at it.

Thread: `holdfast-record` alone reads the log and looks at this host; the record and the facts change under the lock.
Others ask for pictures, under the same lock, and wait on its condition for news. While a long log is read for the first
time, pictures have the header and how far it is: the rest would be out of date before it is drawn.
"""

from __future__ import annotations

import gc
import math
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from holdfast.dashboard.facts import Facts, stored_steps
from holdfast.dashboard.metrics_server import seen_here
from holdfast.events import EventReader
from holdfast.observe.fold import RunRecord
from holdfast.observe.picture import picture, state_of
from holdfast.observe.prometheus import render
from holdfast.placement.directory import RunDirectory

LOOK_S = 0.25
FACTS_S = 1.0
STORED_S = 5.0
READ_S = 60.0  # a long log, for the first time
FED_AT_ONCE = 2000  # events under the lock


class RecordKeeper:
    """Looks until it is closed. `epoch` tells this keeper's numbers from those of an earlier server."""

    def __init__(self, directory: RunDirectory) -> None:
        self.epoch = secrets.token_hex(4)
        self.directory = directory
        self._reader = EventReader(directory.events)
        self._record = RunRecord()
        self._facts = Facts(directory)
        self._facts_at = -math.inf
        self._facts_number = 0  # how often they have changed
        self._stored: set[int] | None = None
        self._stored_at = -math.inf
        self._caught_up = False
        self._news = threading.Condition()
        self._stopping = threading.Event()
        self.trouble = ""
        self._thread = threading.Thread(target=self._run, name="holdfast-record", daemon=True)
        self._thread.start()

    # -- the keeper's thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                with nullcontext() if self._caught_up else _not_collecting():
                    self._look()
                self.trouble = ""
            except OSError as error:  # a disk that does not answer: what is known is still shown
                self.trouble = str(error)
            self._stopping.wait(LOOK_S)
        self._facts.close()

    def _look(self) -> None:
        for batch in self._reader.batches():
            for start in range(0, len(batch), FED_AT_ONCE):
                with self._news:
                    for event in batch[start : start + FED_AT_ONCE]:
                        self._record.feed(event)
                    self._news.notify_all()
                if self._stopping.is_set():
                    return
        now = time.monotonic()
        changed = False
        if now - self._facts_at >= FACTS_S:
            self._facts_at = now
            changed = self._facts.look()
        if now - self._stored_at >= STORED_S and self._record.checkpoints:
            self._stored_at = now
            stored = stored_steps(str(self._record.checkpoints[-1]["uri"]))
            changed, self._stored = changed or stored != self._stored, stored
        with self._news:
            self._facts_number += changed or not self._caught_up
            self._caught_up = True
            self._news.notify_all()

    # -- for everyone --------------------------------------------------------------------------------------

    def wait(self, number: int, facts: int, timeout_s: float) -> bool:
        """Until there is something after these; False if there was nothing in time."""
        with self._news:
            return self._news.wait_for(
                lambda: self._stopping.is_set() or self._record.number > number or self._facts_number > facts, timeout_s
            )

    def picture(self, since: int = 0, facts: int = -1) -> dict[str, Any]:
        """What has changed since event number `since`, and the facts if they are others than those of this number."""
        with self._news:
            if not self._caught_up:
                return self._being_read()
            record, seen = self._record, self._facts
            if since > record.number:
                since = 0
            state = state_of(record, agent=seen.agent, lives=seen.lives)
            over = state in ("finished", "stopped")
            shown = picture(record, record.last if over else time.time(), since, state=state)
            shown |= {"epoch": self.epoch, "facts_number": self._facts_number, "run": self._named()}
            if self._facts_number != facts or not since:
                shown["facts"] = seen.workers
                shown["stored"] = None if self._stored is None else sorted(self._stored)
        return shown

    def metrics(self) -> str:
        """The same as numbers, for Prometheus, as soon as the log has been read."""
        living, suspicion = seen_here(self.directory)
        with self._news:
            self._news.wait_for(lambda: self._stopping.is_set() or self._caught_up, READ_S)
            return render(self._record, time.time(), run=self.directory.name, alive=living, suspicion=suspicion)

    def _being_read(self) -> dict[str, Any]:
        record, known = self._record, max(self._reader.bytes_known, 1)
        return {
            "epoch": self.epoch,
            "number": 0,
            "since": 0,
            "facts_number": -1,
            "run": self._named(),
            "reading": {
                "part": round(min(self._reader.bytes_read / known, 1.0), 4),
                "events": record.number,
                "step": record.step,
                "steps": record.steps,
            },
        }

    def _named(self) -> dict[str, str]:
        return {"name": self.directory.name, "host": self.directory.host, "script": self._record.script}

    def close(self) -> None:
        self._stopping.set()
        with self._news:
            self._news.notify_all()
        self._thread.join(timeout=5.0)

    @property
    def is_closed(self) -> bool:
        return self._stopping.is_set()


@contextmanager
def _not_collecting() -> Iterator[None]:
    """A long log makes millions of objects, none in a circle: looking for circles would take half of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
