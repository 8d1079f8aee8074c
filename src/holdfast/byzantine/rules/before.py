"""What is put before a rule: mixing, bucketing, clipping, copies that count as one. Each takes the rule that comes
after it.

The first four replace the updates by combinations of them, which are never stored: the next pass makes them tile by
tile. What f means for the rule that follows is said with each.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from holdfast.byzantine.arithmetic import squared_distances, total
from holdfast.byzantine.gathering import Gathered
from holdfast.byzantine.kernels.port import Matrix
from holdfast.byzantine.rules.centres import CenteredClipping
from holdfast.byzantine.rules.columns import TrimmedMean
from holdfast.byzantine.rules.port import Outcome, Rule
from holdfast.core.errors import ConfigError


@dataclass(frozen=True)
class NearestNeighbourMixing(Rule):
    """NNM: every update is replaced by the mean of the n - f that are nearest to it, itself included, weighted if
    there are weights. Then the other rule, with the same n and f.

    Needs n > 2f and what the other rule needs. κ = 8f / (n - f) · (κ of the other rule + 1), which is of the best
    order, as in Allouah et al. 2023: for i of S, its neighbourhood and S differ in at most f on each side, those
    outside S are no farther from i than those of S that they stand for, so the mixed updates of S are on average
    within 8f / (n - f) times S's variance of its mean. Scores: the part of the others' neighbourhoods that an update
    is not in. Trusted: in half of them at least, and trusted by the other rule. Allouah et al. 2023, "Fixing by
    Mixing: A Recipe for Optimal Byzantine ML under Heterogeneity", AISTATS.
    """

    then: Rule = field(default_factory=TrimmedMean)
    word: ClassVar[str] = "nnm"

    def least(self, f: int) -> int:
        return max(2 * f + 1, self.then.least(f))

    def coefficient(self, n: int, f: int) -> float | None:
        after = self.then.coefficient(n, f)
        return None if after is None else 8.0 * f / (n - f) * (after + 1.0)

    def in_round(self, number: int) -> Rule:
        return replace(self, then=self.then.in_round(number))

    def run(self, gathered: Gathered) -> Outcome:
        n, weights = gathered.n, gathered.weights
        distances = squared_distances(gathered.gram())
        np.fill_diagonal(distances, -1.0)  # nobody is nearer than oneself
        near = np.zeros((n, n))
        for number, order in enumerate(np.argsort(distances, axis=1, kind="stable")):
            near[number, order[: n - gathered.f]] = 1.0
        factors = near if weights is None else near * weights[None, :]
        outcome = self.then.run(gathered.mixed(factors / total(factors)[:, None], None))
        missing = 1.0 - (total(near.T) - 1.0) / max(n - 1, 1)
        trusted = [bool(one <= 0.5) and bool(other) for one, other in zip(missing, outcome.trusted, strict=True)]
        return Outcome(outcome.result, trusted, list(missing))

    def __str__(self) -> str:
        return f"{self.word}+{self.then}"


@dataclass(frozen=True)
class Bucketing(Rule):
    """The updates are dealt at random into buckets of `size`, and each bucket's mean, weighted if there are weights,
    is one update for the other rule: n / size of them, rounded up, of which f may be hostile. A bucket weighs what its
    members weigh on average, so that no weight is larger than the largest of a member.

    Needs what the other rule needs, for that many. The other rule's κ holds with the bucket means in the place of
    updates; the variance among these is on average a part 1 / size of that among honest updates. `seed` decides who
    is dealt where: all servers must have the same, and hostile participants must not know it before they send. The
    paper deals anew in every round: `in_round`. Scores and trust are the bucket's. Karimireddy et al. 2022,
    "Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing", ICLR.
    """

    size: int = 2
    seed: int = 0
    then: Rule = field(default_factory=TrimmedMean)
    word: ClassVar[str] = "bucketing"

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"size={self.size!r} holds no update", hint="buckets of one update at least")

    def least(self, f: int) -> int:
        return (self.then.least(f) - 1) * self.size + 1

    def weight_ratio(self, n: int, f: int) -> float:
        return self.then.weight_ratio(-(-n // self.size), f)

    def in_round(self, number: int) -> Rule:
        drawn = hashlib.blake2b(f"{self.seed} in round {number}".encode(), digest_size=8).digest()
        return replace(self, seed=int.from_bytes(drawn, "big"), then=self.then.in_round(number))

    def run(self, gathered: Gathered) -> Outcome:
        n = gathered.n
        order = sorted(range(n), key=self._lot)
        bucket = {number: place // self.size for place, number in enumerate(order)}
        factors = np.zeros((-(-n // self.size), n))
        for number, weight in enumerate(np.ones(n) if gathered.weights is None else gathered.weights):
            factors[bucket[number], number] = weight
        sums, members = total(factors), np.bincount(list(bucket.values()))
        weights = None if gathered.weights is None else sums / members
        outcome = self.then.run(gathered.mixed(factors / sums[:, None], weights))
        trusted = [outcome.trusted[bucket[number]] for number in range(n)]
        return Outcome(outcome.result, trusted, [outcome.scores[bucket[number]] for number in range(n)])

    def _lot(self, number: int) -> bytes:
        return hashlib.blake2b(f"{self.seed} {number}".encode()).digest()

    def __str__(self) -> str:
        return f"{self.word}:{self.size}+{self.then}"


@dataclass(frozen=True)
class Clipping(Rule):
    """Updates that are longer than `norm` are scaled down to it. Then the other rule.

    Needs what the other rule needs. No update moves a mean by more than 2 · norm / n; κ is not kept, since honest
    updates are scaled as well (Allouah et al. 2025). Scores: lengths in units of `norm`; trust is the other rule's.
    Sun et al. 2019, "Can You Really Backdoor Federated Learning?".
    """

    norm: float = 1.0
    then: Rule = field(default_factory=TrimmedMean)
    word: ClassVar[str] = "clip"

    def __post_init__(self) -> None:
        if not 0.0 < self.norm < math.inf:
            raise ConfigError(f"norm={self.norm!r} is not above zero and finite", hint="arc chooses a norm by itself")

    def least(self, f: int) -> int:
        return self.then.least(f)

    def weight_ratio(self, n: int, f: int) -> float:
        return self.then.weight_ratio(n, f)

    def in_round(self, number: int) -> Rule:
        return replace(self, then=self.then.in_round(number))

    def run(self, gathered: Gathered) -> Outcome:
        lengths = _lengths(gathered)
        outcome = self.then.run(_clipped(gathered, lengths, self.norm))
        return Outcome(outcome.result, outcome.trusted, list(lengths / self.norm))

    def __str__(self) -> str:
        return f"{self.word}:{self.norm:g}+{self.then}"


@dataclass(frozen=True)
class AdaptiveClipping(Rule):
    """ARC: the 2f (n - f) / n longest updates, rounded down, are scaled to the length of the next longest. Then the
    other rule.

    Needs n > 2f and what the other rule needs. κ = κ of the other rule + 2f / (n - 2f), as in Allouah et al.: if p of
    S are shortened, S's mean moves by D and its variance falls from V to W, then |D|² <= p / (n - f - p) · (V - W),
    since all that are shortened are no shorter than the rest; p is at most 2f (n - f) / n, so that factor is at most
    2f / (n - 2f); and (√(κ W) + |D|)² <= (κ + c) (W + |D|² / c) for every c. Scores: lengths in units of the one that
    the others are scaled to; trust is the other rule's. Allouah et al. 2025, "Adaptive Gradient Clipping for Robust
    Federated Learning", ICLR.
    """

    then: Rule = field(default_factory=TrimmedMean)
    word: ClassVar[str] = "arc"

    def least(self, f: int) -> int:
        return max(2 * f + 1, self.then.least(f))

    def coefficient(self, n: int, f: int) -> float | None:
        after = self.then.coefficient(n, f)
        return None if after is None else after + 2.0 * f / (n - 2 * f)

    def weight_ratio(self, n: int, f: int) -> float:
        return self.then.weight_ratio(n, f)

    def in_round(self, number: int) -> Rule:
        return replace(self, then=self.then.in_round(number))

    def run(self, gathered: Gathered) -> Outcome:
        n, f = gathered.n, gathered.f
        lengths = _lengths(gathered)
        norm = float(np.sort(lengths)[n - 2 * f * (n - f) // n - 1])
        outcome = self.then.run(_clipped(gathered, lengths, norm))
        scores = lengths / norm if norm > 0.0 else np.where(lengths > 0.0, np.inf, 0.0)
        return Outcome(outcome.result, outcome.trusted, list(scores))

    def __str__(self) -> str:
        return f"{self.word}+{self.then}"


@dataclass(frozen=True)
class DistinctUpdates(Rule):
    """Updates that are copies of each other share one weight. Then the other rule, which must be one that honours
    weights. For participants whose honest updates have little in common: there the most that colluding ones can do is
    to agree.

    Needs n > 2f and what the other rule needs. The weight of an update is divided by how many it is alike to, itself
    included: a pair is as alike as one less its cosine is below `width` times that of the median pair, 1 for copies
    and 0 from there on. So k copies, also of different lengths, weigh as much as one update, and honest ones that are
    no more alike than usual lose nothing. κ is not kept, since honest updates may be alike by chance. Attackers that
    keep apart (attacks.Apart) are not noticed, and are withstood as by the other rule alone. Scores: how many an
    update is alike to; trust is the other rule's. After Fung et al. 2020, "The Limitations of Federated Learning in
    Sybil Settings", RAID, who count over all rounds and give copies no weight at all.
    """

    width: float = 0.1
    then: Rule = field(default_factory=CenteredClipping)
    word: ClassVar[str] = "distinct"

    def __post_init__(self) -> None:
        if not 0.0 < self.width <= 1.0:
            raise ConfigError(
                f"width={self.width!r} is not above 0 and at most 1", hint="0.1 takes what is nearly equal"
            )

    def least(self, f: int) -> int:
        return max(2 * f + 1, self.then.least(f))

    def weight_ratio(self, n: int, f: int) -> float:
        return self.then.weight_ratio(n, f)

    def in_round(self, number: int) -> Rule:
        return replace(self, then=self.then.in_round(number))

    def run(self, gathered: Gathered) -> Outcome:
        alike = total(self._alike(_cosines(gathered.gram(origin=True))))
        own = np.ones(gathered.n) if gathered.weights is None else gathered.weights
        outcome = self.then.run(replace(gathered, weights=own / alike))
        return Outcome(outcome.result, outcome.trusted, list(alike))

    def _alike(self, cosines: Matrix) -> Matrix:
        """How far each pair is one update, from 0 to 1."""
        pairs = np.sort(cosines[np.triu_indices(len(cosines), 1)])
        usual = 1.0 - float(pairs[(len(pairs) - 1) // 2]) if len(pairs) else 0.0
        found: Matrix = np.eye(len(cosines))
        if usual > 0.0:
            found = np.maximum(1.0 - (1.0 - cosines) / (self.width * usual), 0.0)
            np.fill_diagonal(found, 1.0)
        return found

    def __str__(self) -> str:
        return f"{self.word}+{self.then}"


def _cosines(gram: Matrix) -> Matrix:
    """Of all pairs, seen from zero, which is the last of this matrix; an update of zeros is like nobody else."""
    beside = gram[:-1, -1]
    products = gram[:-1, :-1] - beside[:, None] - beside[None, :] + gram[-1, -1]
    lengths = np.sqrt(np.maximum(np.diagonal(products), 0.0))
    units = np.where(lengths > 0.0, lengths, 1.0)
    found: Matrix = np.clip(products / units[:, None] / units[None, :], -1.0, 1.0)
    return found


def _lengths(gathered: Gathered) -> Matrix:
    found: Matrix = np.sqrt(squared_distances(gathered.gram(origin=True))[-1, :-1])
    return found


def _clipped(gathered: Gathered, lengths: Matrix, norm: float) -> Gathered:
    factors = np.where(lengths > norm, norm / np.where(lengths > 0.0, lengths, 1.0), 1.0)
    return gathered.mixed(np.diag(factors), gathered.weights)
