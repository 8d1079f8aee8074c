"""How a round is held: whom to ask, how long to wait, how many answers are enough. Pure.

`f` counts the hostile among those who answer, and is absolute. The hostile may say nothing at all, so a round must do
without f of those who were asked: once no more than f are missing, these have `late_s` more, and hold nobody up. Where
more than f drop out, the round ends at its deadline, and is good if those who answered are enough for the rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from holdfast.core.errors import ConfigError

WAIT_MAX_S = 7 * 86400.0


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """`clients`: so many are asked in a round, drawn from the seed; None: all that are there.

    `available_min`: the first round waits for so many, at most until its deadline; that of a run that goes on, whose
    clients may be gone for good, for `late_s`. None: for what the rule needs.
    `answers_min`: with fewer good answers a round is left out; None: what the rule needs.
    """

    clients: int | None = None
    available_min: int | None = None
    answers_min: int | None = None
    deadline_s: float = 600.0
    late_s: float = 15.0
    seed: int = 0

    def validate(self) -> Rounds:
        for name in ("clients", "available_min", "answers_min"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name}={value!r} is no number of clients", hint="1 or more, or leave it away")
        if not 0.0 < self.deadline_s <= WAIT_MAX_S or not 0.0 <= self.late_s <= WAIT_MAX_S:
            said = f"deadline_s={self.deadline_s:g} and late_s={self.late_s:g} are no times to wait"
            raise ConfigError(said, hint="seconds; deadline_s above 0, at most a week")
        if self.clients is not None and self.answers_min is not None and self.answers_min > self.clients:
            said = f"{self.answers_min} answers cannot come from {self.clients} clients"
            raise ConfigError(said, hint="answers_min is at most clients")
        return self

    def drawn(self, number: int, clients: Sequence[int]) -> tuple[int, ...]:
        """Those who are asked in this round: a function of the seed, the round and who is there, and nothing else."""
        if self.clients is None or len(clients) <= self.clients:
            return tuple(sorted(clients))
        return tuple(sorted(Random(f"{self.seed}/{number}").sample(sorted(clients), self.clients)))


@dataclass(frozen=True)
class Patience:
    """How long one question waits. With `needed` good answers and no more than `late` missing, there are enough."""

    deadline_s: float
    late_s: float
    late: int
    needed: int

    def is_enough(self, good: int, missing: int) -> bool:
        return good >= self.needed and missing <= self.late

    def ends_s(self, enough_since_s: float | None) -> float:
        """When waiting ends, in seconds since the question; `enough_since_s`: when there were enough, if there are."""
        if enough_since_s is None:
            return self.deadline_s
        return min(self.deadline_s, enough_since_s + self.late_s)
