"""Simulated rewinds: some steps are bad, whoever is to apply one puts the run back, and the new workers pass it.

Mirrors engine/recovery/rewinding.py: a record in the ledger that only grows, by compare-and-set; a worker reads it
before it registers; whoever finds a longer one later ends. The record is the one that ships (core/rewinds.py).
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from holdfast.core.rewinds import Rewind, Rewinds
from holdfast.core.words import KEY_REWINDS, View
from holdfast.membership import messages as m
from tests.harness.simulator.feed import Command
from tests.harness.simulator.schedule import Violation

if TYPE_CHECKING:
    from tests.harness.simulator.worker import Worker
    from tests.harness.simulator.world import World

ASK_AGAIN_S = 0.5


class RewindBooks:
    """What really happened: which steps are bad, what the ledger has had, which checkpoints are of which time."""

    def __init__(self, world: World) -> None:
        self._world = world
        schedule = world.schedule
        rng = random.Random(f"bad steps of {schedule.seed}")
        self.bad = frozenset(rng.sample(range(schedule.steps), min(schedule.rewinds, schedule.steps)))
        self._saved: set[tuple[int, int]] = set()  # (step, rewinds that its workers knew of)

    def check_record(self, old: Rewinds, new: Rewinds) -> None:
        if new.records[: old.number] != old.records or new.number != old.number + 1:
            raise Violation(f"the record of rewinds does not grow by one: {old} and {new}")
        again = set(new.records[-1].passed) & old.passed
        if again:
            raise Violation(f"the run goes back for step {sorted(again)} once more")
        self._world.trace("the run goes back:", new.records[-1])
        self._world.books.disturbed()

    def overtook(self, member: str) -> bool:
        """Whether the run has gone back without it: it may be taken in, since it ends before it enters."""
        entry = self._world.ledger.entries.get(KEY_REWINDS)
        return entry is not None and entry.value.number > self._world.workers[member].rewinding.known.number

    def saved(self, step: int, worker: Worker) -> None:
        self._saved.add((step, worker.rewinding.known.number))

    def newest(self, worker: Worker) -> int | None:
        """The newest checkpoint of the run as this worker knows it."""
        known = worker.rewinding.known
        return max((step for step, number in self._saved if known.believes(step, number)), default=None)

    def check_restored(self, worker: Worker, step: int | None) -> None:
        records = worker.rewinding.known.records
        numbers = [number for at, number in self._saved if at == step]
        if step is not None and not any(all(step <= one.back_to for one in records[number:]) for number in numbers):
            raise Violation(f"{worker.id} resumes from step {step}, from which the run has gone back")


class Rewinding:
    """Of one process. `known` is the record as it was when it joined."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        entry = worker.world.ledger.entries.get(KEY_REWINDS)
        self.known: Rewinds = entry.value if entry else Rewinds()

    def overtaken(self, event: m.Event) -> bool:
        """The newest that the ledger was seen to say: the run has gone back without this worker, which ends."""
        if not isinstance(event, m.LedgerSaw) or self._held().number <= self.known.number:
            return False
        self._end()
        return True

    def goes_back(self, step: int) -> bool:
        """This step's mean is bad, and the worker does not apply it: it asks until the ledger has a longer record."""
        if step not in self._worker.world.rewinds.bad or step in self.known.passed:
            return False
        self._worker.world.books.disturbed()  # without the ledger nobody can go back, and nobody goes on
        back_to = step - step % 3  # some go back further than to this step, as after an audit
        record = Rewind(back_to=back_to, passed=(step,), reason="it is bad")

        def then() -> None:
            if self._held().number > self.known.number:
                self._end()
                return
            entry = self._worker.feed._entries.get(KEY_REWINDS)
            expected = entry.revision if entry else 0
            self._worker.feed._ask("rewind", lambda: self.put(record, expected))
            self._worker.work(ASK_AGAIN_S, then, blocked=True)

        self._worker.work(0.01, then, blocked=True)
        return True

    def put(self, record: Rewind, expected: int) -> Command:
        ledger = self._worker.world.ledger
        yield lambda: ledger.compare_and_set(KEY_REWINDS, self.known.with_(record), expected)

    def check_entry(self, view: View) -> None:
        for member in view.members:
            if self._worker.world.workers[member].rewinding.known.number > self.known.number:
                raise Violation(f"{self._worker.id} enters {view} with a state that the run has gone back from")

    def _held(self) -> Rewinds:
        entry = self._worker.feed._entries.get(KEY_REWINDS)
        return entry.value if entry else Rewinds()

    def _end(self) -> None:
        self._worker.world.ended(self._worker, m.End("evicted", "the run goes back"))
