"""How a simulated round's updates become the next model: the port, and the plain way, a rule in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from holdfast.byzantine.rules.words import parse
from holdfast.core.errors import TooFewUpdates


@dataclass(frozen=True, kw_only=True)
class Cohort:
    """Who trains together, and by which rule. The last `f` of `clients` are hostile."""

    aggregator: str
    attack: str
    seed: int
    clients: int
    f: int
    lr: float
    model: torch.Tensor  # the first one


@dataclass(frozen=True)
class Combined:
    """`trusted`: for each client; empty if the round was left out, and the model is as it was."""

    model: torch.Tensor
    trusted: tuple[bool, ...] = ()


class Combiner(Protocol):
    def combine(self, model: torch.Tensor, sent: torch.Tensor) -> Combined:
        """`sent` (clients, numbers) are directions: a model goes against them."""
        ...


Combining = Callable[[Cohort], AbstractContextManager[Combiner]]


class ByRule:
    """The server's part in this process."""

    def __init__(self, cohort: Cohort) -> None:
        self._rule, self._f, self._lr = parse(cohort.aggregator), cohort.f, cohort.lr
        self._round = 0

    def combine(self, model: torch.Tensor, sent: torch.Tensor) -> Combined:
        self._round += 1
        try:
            found = self._rule.in_round(self._round).aggregate(sent, self._f)
        except TooFewUpdates:
            return Combined(model)
        assert isinstance(found.value, torch.Tensor)
        return Combined(model - self._lr * found.value, found.trusted)


@contextmanager
def by_rule(cohort: Cohort) -> Iterator[ByRule]:
    yield ByRule(cohort)
