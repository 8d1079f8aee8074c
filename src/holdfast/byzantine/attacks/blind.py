"""Attacks of participants that know only their own update, broken ones included."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from holdfast.byzantine.attacks.port import Attack, Knowledge, own
from holdfast.core.errors import ConfigError


@dataclass(frozen=True)
class SignFlip(Attack):
    """Each sends the opposite of its own update, `scale` times as long. Li et al. 2019 (RSA); Allen-Zhu et al. 2020."""

    scale: float = 4.0
    word: ClassVar[str] = "sign-flip"
    knowledge: ClassVar[Knowledge] = Knowledge.OWN

    def hostile(self, honest: torch.Tensor, f: int, generator: torch.Generator) -> torch.Tensor:
        return own(honest, f) * -self.scale


@dataclass(frozen=True)
class Gaussian(Attack):
    """Each sends noise, `scale` times as long as its own update. Xie et al. 2018, with a scale of the update itself."""

    scale: float = 10.0
    word: ClassVar[str] = "gaussian"
    knowledge: ClassVar[Knowledge] = Knowledge.OWN

    def hostile(self, honest: torch.Tensor, f: int, generator: torch.Generator) -> torch.Tensor:
        mine = own(honest, f)
        lengths = mine.double().norm(dim=1, keepdim=True) / math.sqrt(honest.shape[1])
        noise = torch.randn(mine.shape, generator=generator, dtype=torch.float64)
        made: torch.Tensor = (noise * lengths * self.scale).to(honest.dtype)
        return made


@dataclass(frozen=True)
class NaNBomb(Attack):
    """A few numbers of each update are NaN or infinite; one suffices to ruin a mean. No knowledge is needed."""

    numbers: int = 1
    word: ClassVar[str] = "nan"
    knowledge: ClassVar[Knowledge] = Knowledge.OWN

    def __post_init__(self) -> None:
        if self.numbers < 1:
            raise ConfigError(f"numbers={self.numbers!r} leaves the updates whole", hint="one suffices")

    def hostile(self, honest: torch.Tensor, f: int, generator: torch.Generator) -> torch.Tensor:
        made = own(honest, f)
        kinds = (math.nan, math.inf, -math.inf)
        for number in range(f):
            places = torch.randperm(honest.shape[1], generator=generator)[: self.numbers]
            made[number, places] = kinds[number % len(kinds)]
        return made


@dataclass(frozen=True)
class Dropped(Attack):
    """Each sends nothing: an update of zeros, as a client does that did not train."""

    word: ClassVar[str] = "dropped"
    knowledge: ClassVar[Knowledge] = Knowledge.OWN

    def hostile(self, honest: torch.Tensor, f: int, generator: torch.Generator) -> torch.Tensor:
        return torch.zeros_like(own(honest, f))


@dataclass(frozen=True)
class Doubled(Attack):
    """Each sends its own update twice as long, or `factor` times, as a client does that was counted more than once."""

    factor: float = 2.0
    word: ClassVar[str] = "doubled"
    knowledge: ClassVar[Knowledge] = Knowledge.OWN

    def hostile(self, honest: torch.Tensor, f: int, generator: torch.Generator) -> torch.Tensor:
        return own(honest, f) * self.factor
