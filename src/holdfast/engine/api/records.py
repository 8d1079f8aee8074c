"""What the script has recorded outside its shards, and that it wants to stop. Pure.

Travels with the snapshot: a worker that joins knows the same values, the same best ones, and that the training is over.
So a decision that the script takes on these is taken by all workers at the same step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from holdfast.core.errors import ConfigError

NAMES_MAX = 256
RESULTS_MAX = 10_000  # of evaluations between loops, which a joiner that passes those loops is told again
_HINT = "for example run.best('val_loss:min') or run.best('val_accuracy:max')"


class Best(NamedTuple):
    """The best value of a metric so far, how many steps the run had then, and how many values came after it."""

    value: float
    step: int
    since: int


@dataclass
class Record:
    """One metric: the newest value, how many there were, the least and the greatest of them (the first of equals)."""

    value: float
    step: int
    count: int
    least: tuple[float, int, int]  # value, step, count
    greatest: tuple[float, int, int]

    def add(self, value: float, step: int) -> None:
        self.value, self.step, self.count = value, step, self.count + 1
        now = (value, step, self.count)
        if value < self.least[0] or math.isnan(self.least[0]):
            self.least = now
        if value > self.greatest[0] or math.isnan(self.greatest[0]):
            self.greatest = now

    def state(self) -> list[Any]:
        return [self.value, self.step, self.count, *self.least, *self.greatest]

    @classmethod
    def load(cls, state: Any) -> Record:
        value, step, count, *rest = state
        return cls(value, step, count, tuple(rest[:3]), tuple(rest[3:6]))


def criterion_of(text: str) -> tuple[str, bool]:
    """The metric's name, and whether the largest is the best."""
    name, _, which = text.rpartition(":")
    if not name or which not in ("min", "max"):
        raise ConfigError(f"{text!r} does not say which value is the best", hint=_HINT)
    return name, which == "max"


class Records:
    """See the module. `stop`: after so many steps no loop goes on, and why."""

    def __init__(self) -> None:
        self._known: dict[str, Record] = {}
        self._results: dict[str, Any] = {}  # by place between loops
        self.stop: tuple[int, str] | None = None

    def stops_before(self, step: int) -> str:
        """Why no loop takes this step; empty: the script has not stopped, or later."""
        return self.stop[1] if self.stop is not None and step >= self.stop[0] else ""

    def add(self, name: str, value: float, step: int) -> None:
        known = self._known.get(name)
        if known is not None:
            known.add(value, step)
            return
        if len(self._known) >= NAMES_MAX:
            raise ConfigError(
                f"{name!r} is the metric number {NAMES_MAX + 1} that this run records",
                hint="record a metric under the same name each time, without the step in it",
            )
        self._known[name] = Record(value, step, 1, (value, step, 1), (value, step, 1))

    @property
    def newest(self) -> dict[str, float]:
        return {name: record.value for name, record in self._known.items()}

    def at(self, step: int) -> dict[str, float]:
        """What was recorded when the run had so many steps."""
        return {name: record.value for name, record in self._known.items() if record.step == step}

    def best(self, criterion: str) -> Best:
        name, largest = criterion_of(criterion)
        known = self._known.get(name)
        if known is None:
            among = ", ".join(self._known) or "nothing at all"
            raise ConfigError(
                f"{name!r} was not recorded yet, only {among}", hint=f"call run.record({name}=...) before run.best"
            )
        value, step, count = known.greatest if largest else known.least
        return Best(value, step, known.count - count)

    def is_new_best(self, criterion: str, step: int) -> bool:
        """Whether the newest value, which is of this step, is better than all before, and a number."""
        name, _ = criterion_of(criterion)
        if name not in self._known:
            return False
        best = self.best(criterion)
        return best.step == step and not best.since and not math.isnan(best.value)

    # ---- results of evaluations between loops

    def keep_result(self, place: str, result: Any) -> None:
        self._results[place] = result
        while len(self._results) > RESULTS_MAX:
            del self._results[next(iter(self._results))]

    def result(self, place: str) -> Any:
        return self._results.get(place)

    # ---- as a part of the snapshot: nothing at all where nothing was recorded

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self._known:
            found["recorded"] = {name: record.state() for name, record in self._known.items()}
        if self._results:
            found["results"] = dict(self._results)
        if self.stop is not None:
            found["stop"] = list(self.stop)
        return found

    def load(self, state: Mapping[str, Any]) -> None:
        self._known = {name: Record.load(record) for name, record in state.get("recorded", {}).items()}
        self._results = dict(state.get("results", {}))
        step, reason = state.get("stop", (0, ""))
        self.stop = (step, reason) if reason else None
