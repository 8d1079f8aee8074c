"""What a framework has to offer so that its variables can be trained by the step engine. Owns nothing.

A variable stays the framework's own; the engine sees a torch tensor with the same bits (mirror.py). `shares` says that
the two are one and the same memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch


class Framework(ABC):
    """Belongs to the thread of the user's loop, as everything here."""

    name: ClassVar[str]
    shares: ClassVar[bool] = False

    @abstractmethod
    def prepare(self, threads: int) -> None:
        """Deterministic operations, and so many threads. ConfigError if it computes with another number already."""

    @abstractmethod
    def tensor(self, value: Any) -> torch.Tensor:
        """A variable's value, or what was computed, as a tensor that may share its memory: to be read at once."""

    @abstractmethod
    def write(self, variable: Any, tensor: torch.Tensor) -> None:
        """The tensor's values into a variable. They share no memory afterwards, unless they did before."""

    @abstractmethod
    def value(self, tensor: torch.Tensor) -> Any:
        """What the framework computes with: a copy of the tensor, or where `shares` the tensor itself."""

    @abstractmethod
    def seed(self, number: int) -> None:
        """Its process-wide generators, but for those that are variables."""

    @abstractmethod
    def batch(self, arrays: Any) -> Any:
        """One array of a batch as the framework's own tensor."""

    def apply(self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        """One update by a Keras optimizer."""
        optimizer.apply(gradients, variables)
