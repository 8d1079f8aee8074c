"""Attacks of participants that know all honest updates of the round, and act together."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar

import torch

from holdfast.byzantine.attacks.port import Attack, Knowledge, alike
from holdfast.core.errors import ConfigError

HALVINGS = 40


class AlongOneDirection(Attack):
    """All attackers send the honest mean plus `strength` times a direction. optimising.py searches for the strength."""

    @abstractmethod
    def direction(self, honest: torch.Tensor) -> torch.Tensor:
        """In float64."""

    @abstractmethod
    def strength(self, honest: torch.Tensor, f: int) -> float:
        """How far along, if nobody searches."""

    def at(self, honest: torch.Tensor, f: int, strength: float) -> torch.Tensor:
        mean = honest.double().mean(dim=0)
        return alike((mean + strength * self.direction(honest)).to(honest.dtype), f)

    def hostile(self, honest: torch.Tensor, f: int, generator: torch.Generator) -> torch.Tensor:
        return self.at(honest, f, self.strength(honest, f))


@dataclass(frozen=True)
class LittleIsEnough(AlongOneDirection):
    """ALIE: the mean less z standard deviations of every coordinate, near enough that honest ones are farther out.

    Without a z, the largest for which, if honest numbers are normal, enough honest participants are expected beyond
    it to make a majority with the attackers. Baruch et al. 2019, "A Little Is Enough: Circumventing Defenses for
    Distributed Learning".
    """

    z: float | None = None
    word: ClassVar[str] = "alie"
    knowledge: ClassVar[Knowledge] = Knowledge.OTHERS

    def direction(self, honest: torch.Tensor) -> torch.Tensor:
        return -honest.double().std(dim=0, correction=0)

    def strength(self, honest: torch.Tensor, f: int) -> float:
        if self.z is not None:
            return self.z
        n = len(honest) + f
        needed = n // 2 + 1 - f  # honest ones that must be won over
        share = (len(honest) - needed) / len(honest)
        return NormalDist().inv_cdf(min(max(share, 0.5), 0.999)) if share > 0.5 else 0.0


@dataclass(frozen=True)
class InnerProduct(AlongOneDirection):
    """Inner-product manipulation, or fall of empires: minus `epsilon` times the honest mean, so that the aggregate
    points away from where it should go. Xie et al. 2020, "Fall of Empires: Breaking Byzantine-tolerant SGD by Inner
    Product Manipulation".
    """

    epsilon: float = 2.0
    word: ClassVar[str] = "ipm"
    knowledge: ClassVar[Knowledge] = Knowledge.OTHERS

    def direction(self, honest: torch.Tensor) -> torch.Tensor:
        return -honest.double().mean(dim=0)

    def strength(self, honest: torch.Tensor, f: int) -> float:
        return 1.0 + self.epsilon


@dataclass(frozen=True)
class Mimic(Attack):
    """All send a copy of one honest participant's update, which then counts f + 1 times: nobody is an outlier.

    The one whose update is farthest along the direction in which honest updates differ most, or `victim`. Karimireddy
    et al. 2022, "Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing".
    """

    victim: int | None = None
    word: ClassVar[str] = "mimic"
    knowledge: ClassVar[Knowledge] = Knowledge.OTHERS

    def hostile(self, honest: torch.Tensor, f: int, generator: torch.Generator) -> torch.Tensor:
        victim = self.victim
        if victim is None:
            centred = honest.double() - honest.double().mean(dim=0)
            _, vectors = torch.linalg.eigh(centred @ centred.T)
            victim = int(vectors[:, -1].abs().argmax())
        if not 0 <= victim < len(honest):
            raise ConfigError(f"there is no honest participant {victim}", hint=f"0 to {len(honest) - 1}")
        return alike(honest[victim], f)


class _AsFarAsAllowed(AlongOneDirection):
    """The largest strength at which a condition on distances still holds, by halving."""

    def direction(self, honest: torch.Tensor) -> torch.Tensor:
        return -honest.double().std(dim=0, correction=0)

    def strength(self, honest: torch.Tensor, f: int) -> float:
        mean, direction = honest.double().mean(dim=0), self.direction(honest)
        if not bool(direction.any()):
            return 0.0
        limit = self.measure(_squared_among(honest))
        centred = [row.double() - mean for row in honest]
        away = torch.stack([row.square().sum() for row in centred])
        along, length = torch.stack([row @ direction for row in centred]), direction @ direction

        def is_harmless(strength: float) -> bool:
            return self.measure(away - 2.0 * strength * along + strength**2 * length) <= limit

        low, high = 0.0, 1.0
        while is_harmless(high) and high < 2.0**HALVINGS:
            low, high = high, 2.0 * high
        for _ in range(HALVINGS):
            middle = (low + high) / 2.0
            low, high = (middle, high) if is_harmless(middle) else (low, middle)
        return low

    @abstractmethod
    def measure(self, squared: torch.Tensor) -> float:
        """What must not be larger for the attackers' squared distances to honest updates than for any honest one's."""


@dataclass(frozen=True)
class MinMax(_AsFarAsAllowed):
    """The mean less as many standard deviations as keep it no farther from any honest update than two of those are
    apart.

    Shejwalkar and Houmansadr 2021, "Manipulating the Byzantine", NDSS.
    """

    word: ClassVar[str] = "min-max"
    knowledge: ClassVar[Knowledge] = Knowledge.OTHERS

    def measure(self, squared: torch.Tensor) -> float:
        return float(squared.max())


@dataclass(frozen=True)
class MinSum(_AsFarAsAllowed):
    """As min-max, with the sum of squared distances to all honest updates, which is no larger than that of any honest
    one.

    Shejwalkar and Houmansadr 2021, "Manipulating the Byzantine", NDSS.
    """

    word: ClassVar[str] = "min-sum"
    knowledge: ClassVar[Knowledge] = Knowledge.OTHERS

    def measure(self, squared: torch.Tensor) -> float:
        return float(squared.sum(dim=-1).max())


@dataclass(frozen=True)
class ModelReplacement(Attack):
    """Boosted so that the mean of all becomes `target`: the model that the attackers want, less the current one.

    Without a target, the opposite of the honest mean. Bagdasaryan et al. 2020, "How To Backdoor Federated Learning",
    AISTATS.
    """

    target: torch.Tensor | None = None
    word: ClassVar[str] = "model-replacement"
    knowledge: ClassVar[Knowledge] = Knowledge.OTHERS

    def hostile(self, honest: torch.Tensor, f: int, generator: torch.Generator) -> torch.Tensor:
        mean = honest.double().mean(dim=0)
        target = -mean if self.target is None else self.target.double()
        if target.shape != mean.shape:
            raise ConfigError(
                f"the target is {tuple(target.shape)}, and an update {tuple(mean.shape)}", hint="flatten it"
            )
        return alike(((target * (len(honest) + f) - mean * len(honest)) / f).to(honest.dtype), f)


@dataclass(frozen=True)
class Apart(Attack):
    """Each points against the honest mean and somewhere else besides, as long as the median honest update, so that no
    two attackers are alike: their cosine is `likeness`, 0 for a right angle, and what they add up to points straight
    against the mean. Against rules that take copies for one; ours.
    """

    likeness: float = 0.8
    word: ClassVar[str] = "apart"
    knowledge: ClassVar[Knowledge] = Knowledge.OTHERS

    def __post_init__(self) -> None:
        if not 0.0 <= self.likeness <= 1.0:
            raise ConfigError(f"likeness={self.likeness!r} is no cosine between attackers", hint="0 to 1")

    def hostile(self, honest: torch.Tensor, f: int, generator: torch.Generator) -> torch.Tensor:
        mean, length = honest.double().mean(dim=0), honest.double().norm(dim=1).median()
        against = -mean / mean.norm().clamp(min=torch.finfo(torch.float64).tiny)
        if not 1 < f < honest.shape[1]:
            return alike((against * length).to(honest.dtype), f)
        noise = torch.randn(honest.shape[1], f, generator=generator, dtype=torch.float64)
        sides = torch.linalg.qr(noise - torch.outer(against, against @ noise)).Q.T
        sides = sides - sides.mean(dim=0)  # the corners of a simplex: together they come to nothing
        sides = sides / sides.norm(dim=1, keepdim=True)
        share = (1.0 + (f - 1) * self.likeness) / f
        made: torch.Tensor = (math.sqrt(share) * against + math.sqrt(1.0 - share) * sides) * length
        return made.to(honest.dtype)


def _squared_among(honest: torch.Tensor) -> torch.Tensor:
    centred = honest.double() - honest.double().mean(dim=0)
    products = centred @ centred.T
    own = products.diagonal()
    return (own[:, None] + own[None, :] - 2.0 * products).clamp(min=0.0)
