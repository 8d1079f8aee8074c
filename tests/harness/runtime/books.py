"""The books of a simulated run: what must hold whatever goes wrong.

What a script comes to, step by step and line by line, is known: a quiet run of one worker has done it before. Every
worker's weights after every step, every loss, and every result of an evaluation must have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from holdfast.core.words import View
from holdfast.engine.api.run import Run
from holdfast.state.snapshot import Snapshot
from tests.harness.runtime.schedule import Violation

if TYPE_CHECKING:
    from tests.harness.runtime.process import Process
    from tests.harness.runtime.world import World

PROGRESS_S = 150.0  # after the last fault, or its end, everybody gets on: 60 of them a silent worker is waited for
VIEWS_MAX = 20  # since the last fault, or its end
TORN = ("not those that were promised", "do not hold the same state", "arrived with the digest")


class Outcome:
    """What a run has come to."""

    def __init__(self) -> None:
        self.steps: dict[int, tuple[float, tuple[float, ...]]] = {}  # loss, and weights after it
        self.results: dict[str, float] = {}
        self.final: tuple[float, ...] | None = None
        self.count = 0


class Books:
    def __init__(self, world: World, expected: Outcome | None) -> None:
        self._world = world
        self._expected = expected
        self.outcome = Outcome()
        self.views: dict[int, View] = {}
        self.finishers = 0
        self.steps_applied = 0  # by all workers together
        self.violation: Violation | None = None
        self.when_applied: dict[int, list[Callable[[], object]]] = {}  # what a scenario does at a step
        self._disturbed_at = 0.0
        self._views_since = 0
        self._places: dict[str, tuple[object, float]] = {}
        self._saved: dict[tuple[int, int], str] = {}

    def violated(self, text: str) -> None:
        """Said by a thread that nobody listens to: the world raises it."""
        if self.violation is None:
            self.violation = Violation(text)

    def disturbed(self) -> None:
        self._disturbed_at = self._world.timeline.now
        self._views_since = 0

    # ---- nobody waits for ever

    def check_everybody_gets_on(self) -> None:
        now, up = self._world.timeline.now, self._world.ledger.up
        for process in self._world.living():
            place = process.place
            known, since = self._places.get(process.id, (None, 0.0))
            if place != known or not up or process.is_spare:
                self._places[process.id] = (place, now)
            elif now - max(since, self._disturbed_at) > PROGRESS_S:
                self.violated(f"{process.id} waits for ever; {self.waiting()}")

    def waiting(self) -> dict[str, str]:
        return {process.id: process.words for process in self._world.living()}

    # ---- views

    def check_view(self, old: View | None, new: View) -> None:
        if new.number != (old.number + 1 if old else 1) or len(set(new.members)) != len(new.members) or not new.members:
            self.violated(f"view {new} does not follow {old}")
        if self.views.setdefault(new.number, new) != new:
            self.violated(f"two views of number {new.number}: {self.views[new.number]} and {new}")
        self._world.trace("view", new)
        self._views_since += 1
        if self._views_since > VIEWS_MAX:
            self.violated(f"{VIEWS_MAX} views since the last fault, and no end; {self.waiting()}")

    # ---- steps and lines

    def applied(self, process: Process, step: int, loss: float, weights: tuple[float, ...]) -> None:
        self._world.trace(process.id, "applied step", step)
        if process.next_step not in (None, step):
            self.violated(f"{process.id} applies step {step}, where {process.next_step} is due")
        process.next_step = step + 1
        self.steps_applied += 1
        for act in self.when_applied.pop(step, []):
            self._world.timeline.after(0.0, act)
        self._same(process, f"step {step}", (loss, weights), self._of("steps", step))

    def found(self, process: Process, what: str, value: float) -> None:
        self._same(process, what, value, self._of("results", what))

    def _of(self, kind: str, key: Any) -> tuple[dict[Any, Any], Any]:
        """Where it is written down, and under what; what is expected is there already."""
        expected = self._expected
        return getattr(self.outcome if expected is None else expected, kind), key

    def _same(self, process: Process, what: str, value: object, at: tuple[dict[Any, Any], Any]) -> None:
        known, key = at
        if self._expected is None:
            known.setdefault(key, value)
        if known.get(key) != value:
            self.violated(f"{process.id}: {what} came to {value}, not to {known.get(key)}")

    def check_saved(self, worker: str, snapshot: Snapshot) -> None:
        """All members save the same."""
        digest = snapshot.digest()
        if self._saved.setdefault((snapshot.step, len(snapshot.tree)), digest) != digest:
            self.violated(f"{worker} saves another state of step {snapshot.step} than others")

    def started_over(self) -> None:
        """Where how many steps there are does not follow from the script, another start may come to something else."""
        if not self._world.schedule.script.is_exact:
            self.outcome = Outcome()
            self._saved.clear()

    def finished(self, process: Process, run: Run) -> None:
        weights = process.training.weights() if process.training is not None else ()
        self.finishers += 1
        expected = self._expected
        if expected is None:
            if self.outcome.final is None:
                self.outcome.final, self.outcome.count = weights, run.step
            expected = self.outcome
        if (weights, run.step) != (expected.final, expected.count):
            self.violated(
                f"{process.id} finished with {weights} after {run.step} steps, not with {expected.final} after "
                f"{expected.count}"
            )

    def script_failed(self, process: Process, error: BaseException) -> None:
        self.violated(f"{process.id}: its script failed: {error!r}")

    def told(self, process: Process, kind: str, fields: dict[str, Any]) -> None:
        if kind in ("joined", "resumed", "started_over"):
            process.next_step = None
        if kind in ("resumed", "started_over"):
            self.started_over()
        torn = kind == "evicted" and any(words in fields["reason"] for words in TORN)
        if torn and fields["view"] == max(self.views):  # who was overtaken reads what the others have changed since
            self.violated(f"{process.id} was given a state that changed meanwhile: {fields['reason']}")
