"""Attacks of participants that also know the rule: the strength that does the most harm to it, and different roles."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from holdfast.byzantine.attacks.colluding import AlongOneDirection, InnerProduct, LittleIsEnough
from holdfast.byzantine.attacks.port import Attack, Knowledge
from holdfast.byzantine.rules.columns import TrimmedMean
from holdfast.byzantine.rules.port import Rule
from holdfast.core.errors import ConfigError


@dataclass(frozen=True)
class Optimised(Attack):
    """The strength of an attack along one direction for which this rule's value is farthest from the honest mean.

    A line search with `tries` evaluations of the rule: steps that double while it gets worse for the rule, then steps
    that shrink. Allouah et al. 2023 (their ALIE and FOE are searched so), after Shejwalkar and Houmansadr 2021.
    """

    attack: AlongOneDirection = field(default_factory=LittleIsEnough)
    rule: Rule = field(default_factory=TrimmedMean)
    tries: int = 20
    word: ClassVar[str] = "optimised"
    knowledge: ClassVar[Knowledge] = Knowledge.RULE

    def __post_init__(self) -> None:
        if self.tries < 2:
            raise ConfigError(f"tries={self.tries!r} is no search", hint="two at least")

    def hostile(self, honest: torch.Tensor, f: int, generator: torch.Generator) -> torch.Tensor:
        return self.attack.at(honest, f, self.strength(honest, f))

    def strength(self, honest: torch.Tensor, f: int) -> float:
        mean = honest.double().mean(dim=0)

        def harm(strength: float) -> float:
            updates = [*honest, *self.attack.at(honest, f, strength)]
            value = self.rule.aggregate(updates, f).value
            assert isinstance(value, torch.Tensor)
            return float((value.double() - mean).norm())

        best, step, left = 0.0, 0.5, self.tries - 1
        worst = harm(best)
        grows = True
        while left > 0:
            sides = (step,) if grows else (step, -step)
            found = [(harm(best + side), best + side) for side in sides[:left]]
            left -= len(found)
            gets_worse = max(found) > (worst, best)
            if gets_worse:
                worst, best = max(found)
            grows = grows and gets_worse
            step = step * 2.0 if grows else step / 2.0
        return best


@dataclass(frozen=True)
class Split(Attack):
    """Colluding in two roles: half of the attackers, rounded up, do one thing and the rest another, from the same
    knowledge.

    By default some press where the rule gives way (ALIE) while others shout (inner product) and are trimmed in their
    place.
    """

    first: Attack = field(default_factory=LittleIsEnough)
    second: Attack = field(default_factory=lambda: InnerProduct(epsilon=10.0))
    word: ClassVar[str] = "colluding"
    knowledge: ClassVar[Knowledge] = Knowledge.OTHERS

    def hostile(self, honest: torch.Tensor, f: int, generator: torch.Generator) -> torch.Tensor:
        some = (f + 1) // 2
        rest = honest[:0] if f == some else self.second.hostile(honest, f - some, generator)
        return torch.cat([self.first.hostile(honest, some, generator), rest])
