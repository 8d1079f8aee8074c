"""Keras on torch: its variables are torch parameters, and the mirror is made of the same ones. Nothing is copied."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from holdfast.integrations.variables.port import Framework


class OnTorch(Framework):
    """See the port. Threads, determinism and generators are what holdfast.join sees to itself."""

    name = "torch"
    shares = True

    def prepare(self, threads: int) -> None:
        torch.set_num_threads(threads)

    def tensor(self, value: Any) -> torch.Tensor:
        found = value if isinstance(value, torch.Tensor) else value.value
        assert isinstance(found, torch.Tensor)
        return found

    def write(self, variable: Any, tensor: torch.Tensor) -> None:
        with torch.no_grad():
            self.tensor(variable).copy_(tensor)

    def value(self, tensor: torch.Tensor) -> Any:
        return tensor

    def seed(self, number: int) -> None:
        pass

    def batch(self, arrays: Any) -> Any:
        return torch.from_numpy(arrays)

    def apply(self, optimizer: Any, gradients: Sequence[Any], variables: Sequence[Any]) -> None:
        with torch.no_grad():
            optimizer.apply(gradients, variables)
