"""What a rule is: one signature for all of them, and what it gives back.

**f** is a number of updates, never a fraction: the rule's bound holds as long as no more than f of the n are hostile.

**Bounds.** A rule is (f, κ)-robust if for any n updates and *any* n - f of them, S, the distance of its value to the
mean of S is bounded: |value - mean(S)|² <= κ · the mean over S of |x - mean(S)|². `coefficient(n, f)` is such a κ, for
equal weights, or None where none is proven; `weighted_coefficient` is one for whatever weights are claimed. No rule
has less than f / (n - 2f) (Allouah et al. 2023, "Fixing by Mixing", AISTATS).

**Not finite.** An update with a NaN, an infinity or a number beyond float32's range is an attack that shows itself.
It is taken out before any rule looks at it. It may have been one of the f, or of an honest participant whose numbers
ran over while the f are still there: so of b such updates, n - b are combined with f as long as they are enough for
that, and else with the largest number that they are enough for, f - b at least. If b is larger than f, or n - b are
too few for f - b, TooFewUpdates says so.

**Ties** go to the update that comes first.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from holdfast.byzantine.gathering import Gathered, NotFinite
from holdfast.byzantine.updates import Result, Updates, UpdatesLike, Value, as_updates
from holdfast.byzantine.weighting import Weights, bounded, ratio
from holdfast.core.errors import ConfigError, TooFewUpdates


@dataclass(frozen=True)
class Aggregate:
    """`value` has the form of one update. For each update: whether it was trusted, and a score, larger for the more
    suspect.

    What scores mean is each rule's own; that of an update that is not finite, or that claimed an absurd weight, is
    infinite.
    """

    value: Value
    trusted: tuple[bool, ...]
    scores: tuple[float, ...]


@dataclass(frozen=True)
class Outcome:
    """The same for the updates that took part."""

    result: Result
    trusted: Sequence[bool]
    scores: Sequence[float]


@dataclass(frozen=True)
class Rule(ABC):
    """Combines updates. A rule has settings and no memory: the same updates give the same bits, in any process.

    `f`: against how many hostile updates, where `aggregate` is not told.
    """

    f: int | None = field(default=None, kw_only=True)
    word: ClassVar[str]  # its name on a command line

    @abstractmethod
    def least(self, f: int) -> int:
        """The smallest n for which the rule's bound holds with so many hostile updates."""

    @abstractmethod
    def run(self, gathered: Gathered) -> Outcome:
        """Combines what is gathered. For rules that are put before others; everybody else calls `aggregate`."""

    def coefficient(self, n: int, f: int) -> float | None:
        """The κ that is proven for n updates of which f are hostile."""
        return None

    def weight_ratio(self, n: int, f: int) -> float:
        """How many times as heavy as another an update may be at most. 1: all weigh the same."""
        return ratio(n, f)

    def weighted_coefficient(self, n: int, f: int) -> float | None:
        """The κ that holds for whatever weights are claimed, about S's mean and variance by the bounded weights."""
        even, most = self.coefficient(n, f), self.weight_ratio(n, f)
        return even if even is None or most == 1.0 else most**4 * (even + 1.0)

    def bearing(self, n: int, f: int, gone: int) -> int:
        """How many hostile ones to bear among n updates, where `gone` that may have been of the f are out already.

        f as long as n are enough for it, since those that are gone may have been honest; never less than f - gone.
        """
        lowest = max(f - gone, 0)
        return next((left for left in range(f, lowest, -1) if n >= self.least(left)), lowest)

    def in_round(self, number: int) -> Rule:
        """The rule for this round of a training: what it draws by chance is drawn anew. Others are what they are."""
        return self

    def aggregate(
        self,
        updates: UpdatesLike,
        f: int | None = None,
        weights: Sequence[float] | None = None,
        *,
        out: Value | None = None,
    ) -> Aggregate:
        """The value that these updates come to, whatever f of them are. `out`: memory for it, like one update.

        Weights are bounded by `weight_ratio`, whatever is claimed: see weighting.py.
        """
        source = as_updates(updates)
        f = self.checked(source.count, f)
        return self.combined(source, f, source.result(out), None if weights is None else bounded(weights, source.count))

    def combined(self, source: Updates, f: int, result: Result, claimed: Weights | None = None) -> Aggregate:
        """The same for updates that are read already. For those who keep updates in forms of their own."""
        n = source.count
        hostile = set() if claimed is None else set(claimed.hostile)
        empty = set() if claimed is None else set(claimed.empty)
        while True:
            live = tuple(number for number in range(n) if number not in hostile and number not in empty)
            left = self.bearing(len(live), f, len(hostile))
            if len(hostile) > f or not live or len(live) < self.least(left):
                wants = f"is told of {f}" if len(hostile) > f else f"needs {self.least(left)} for f={left}"
                raise TooFewUpdates(
                    f"{len(hostile)} of {n} updates are not finite or claim an absurd weight, {len(empty)} none: "
                    f"{self} {wants}, and {len(live)} are left",
                    hint="leave the round out and look at who sent them",
                )
            values = None if claimed is None else claimed.within(self.weight_ratio(len(live), left), live)
            try:
                outcome = self.run(Gathered(source, live, left, result, values))
                break
            except NotFinite as found:
                hostile |= {live[place] for place in found.places}
        trusted = dict(zip(live, outcome.trusted, strict=True))
        scores = dict(zip(live, outcome.scores, strict=True))
        return Aggregate(
            outcome.result.value,
            tuple(bool(trusted.get(number, False)) for number in range(n)),
            tuple(float(scores.get(number, float("inf"))) for number in range(n)),
        )

    def checked(self, n: int, f: int | None = None) -> int:
        """f, or the rule's own. ConfigError if it is no such number, or if n updates are too few for it."""
        f = self.f if f is None else f
        if f is None:
            raise ConfigError(
                f"{self} was not told how many updates may be hostile", hint=f"{type(self).__name__}(f=1), for example"
            )
        if isinstance(f, bool) or not isinstance(f, int) or f < 0:
            raise ConfigError(f"f={f!r} is not a number of updates", hint="f counts hostile updates: 0, 1, 2, …")
        if n < self.least(f):
            raise ConfigError(
                f"{self} with f={f} needs at least {self.least(f)} updates, and there are {n}",
                hint="ask for a smaller f, wait for more updates, or choose another rule",
            )
        return f

    def __str__(self) -> str:
        return self.word


def halfway(f: int, n: int) -> float:
    """Half way between how often anybody is outside of the n - 2f in the middle, if all are alike, and always."""
    return (1.0 + 2.0 * f / n) / 2.0
