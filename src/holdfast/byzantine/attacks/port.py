"""What an attack on updates is, and what it may know."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum
from typing import ClassVar

import torch

from holdfast.core.errors import ConfigError


class Knowledge(Enum):
    """What the attackers of a round know before they send."""

    OWN = "what an honest participant in their place would have sent"
    OTHERS = "all honest updates of the round"
    RULE = "all honest updates of the round, and the rule that will combine them"


class Attack(ABC):
    """f updates made from the honest ones. The same seed gives the same updates.

    Who knows only their own (Knowledge.OWN) sees honest update i % h where hostile participant i stands: its data
    would have given something like it.
    """

    word: ClassVar[str]
    knowledge: ClassVar[Knowledge]

    def __call__(self, honest: torch.Tensor, f: int, seed: int = 0) -> torch.Tensor:
        if honest.ndim != 2 or not len(honest):
            raise ConfigError(f"honest updates are (h, d), not {tuple(honest.shape)}", hint="stack them")
        if isinstance(f, bool) or not isinstance(f, int) or f < 0:
            raise ConfigError(f"f={f!r} is not a number of attackers", hint="0, 1, 2, …")
        made = self.hostile(honest, f, torch.Generator().manual_seed(seed)) if f else honest[:0].clone()
        assert made.shape == (f, honest.shape[1]) and made.dtype == honest.dtype
        return made

    @abstractmethod
    def hostile(self, honest: torch.Tensor, f: int, generator: torch.Generator) -> torch.Tensor:
        """The f updates; at least one is asked for."""


def own(honest: torch.Tensor, f: int) -> torch.Tensor:
    """What honest participants in the attackers' places would have sent, near enough."""
    return honest[torch.arange(f) % len(honest)].clone()


def alike(update: torch.Tensor, f: int) -> torch.Tensor:
    """The same from all of them."""
    return update.unsqueeze(0).repeat(f, 1)
