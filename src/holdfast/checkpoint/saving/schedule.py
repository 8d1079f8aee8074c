"""When a checkpoint is due: after so many steps, so many seconds, or as often as it pays. Pure.

`auto` weighs what a save costs against what a loss of all workers would cost, after Young (1974) and Daly (2006): the
best time between two saves is sqrt(2 C / rate), where C is how much longer training takes with a save in it and `rate`
is how often everything is lost. The rate is learned: one loss a day to begin with, and every loss that this run has
seen counts in full.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from holdfast.core.durations import parse_duration
from holdfast.core.errors import ConfigError
from holdfast.core.options.kinds import parse_whole

AUTO_S_MIN, AUTO_S_MAX = 10.0, 3600.0
PRIOR_S = 86400.0  # one loss in this time is assumed before anything is known
COST_S_MIN = 0.02  # what cannot be measured is not free
BUSY_SHARE = 0.1  # of the time, at most, are parts on their way to storage
EVERY_MAX = 1e9
_STEPS = re.compile(r"(\d{1,12}(?:\.\d{1,12})?)(?:\s*steps?)?")
_HINT = "give a number of steps (500), a time (30s, 10min, 2h), or auto"


@dataclass(frozen=True)
class Every:
    """`steps` or `seconds` between two checkpoints; neither: auto."""

    steps: int = 0
    seconds: float = 0.0

    @property
    def auto(self) -> bool:
        return not self.steps and not self.seconds

    @classmethod
    def parse(cls, text: str | int) -> Every:
        word = str(text).strip()
        if word == "auto":
            return cls()
        steps = _STEPS.fullmatch(word)
        try:
            number = float(parse_whole("", steps[1], _HINT) if steps else parse_duration("", word, _HINT))
        except ConfigError:
            number = 0.0
        if not 0 < number < EVERY_MAX:
            raise ConfigError(f"a checkpoint every {word[:40]!r} makes no sense", hint=_HINT)
        return cls(steps=int(number)) if steps else cls(seconds=number)

    def __str__(self) -> str:
        if self.auto:
            return "auto"
        return f"{self.steps} steps" if self.steps else f"{self.seconds:g}s"


class Schedule:
    """One worker's account of when the next checkpoint is due. All count the steps; the first watches the time."""

    def __init__(self, every: Every, now: float) -> None:
        self._every = every
        self._began_at = now
        self._last_at = now
        self._last_step = 0
        self._cost_s = COST_S_MIN
        self._durable_s = 0.0
        self._losses = 0

    def resumed(self, step: int, now: float) -> None:
        """The run starts from a checkpoint: everything was lost once."""
        self._losses += 1
        self._last_step, self._last_at = step, now

    def lost(self) -> None:
        """A worker was lost. It might have been all of them."""
        self._losses += 1

    def begun(self, step: int, now: float) -> None:
        self._last_step, self._last_at = step, now

    def cost(self, held_s: float, durable_s: float) -> None:
        """What a save has taken: training held up, and until it was in storage."""
        self._cost_s = max(COST_S_MIN, (self._cost_s + held_s) / 2)
        self._durable_s = durable_s

    def is_due(self, step: int, now: float, *, first: bool) -> bool:
        """After the step that leads to the state before `step`. `first`: of the members, whose clock counts."""
        if step <= self._last_step:
            return False
        if self._every.steps:
            return step % self._every.steps == 0 or step - self._last_step > self._every.steps
        return first and now - self._last_at >= self.interval_s(now)

    def interval_s(self, now: float) -> float:
        if self._every.seconds:
            return self._every.seconds
        rate = (1 + self._losses) / (PRIOR_S + now - self._began_at)
        best = math.sqrt(2 * self._cost_s / rate)
        return min(max(best, AUTO_S_MIN, self._durable_s / BUSY_SHARE), AUTO_S_MAX)
