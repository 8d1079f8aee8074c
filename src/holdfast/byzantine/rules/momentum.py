"""Worker momentum: a participant sends an average of its gradients over time instead of each one.

Noise that is averaged away is noise that a hostile participant cannot hide in, and attacks that add up over rounds show
(Karimireddy et al. 2021; Farhadkhani et al. 2022). It belongs to the participant; the server need not know of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from holdfast.byzantine.updates import Value
from holdfast.core.errors import ConfigError


class WorkerMomentum:
    """One participant's: m = beta · m + (1 - beta) · g, beginning with the first gradient."""

    def __init__(self, beta: float = 0.9) -> None:
        if not 0.0 <= beta < 1.0:
            raise ConfigError(f"beta={beta!r} is not at least 0 and below 1", hint="0.9 is usual, 0 is no momentum")
        self.beta = beta
        self._kept: dict[str, torch.Tensor] | None = None

    def apply(self, gradient: torch.Tensor | Mapping[str, torch.Tensor]) -> Value:
        """What to send in place of this gradient. Whole numbers, such as counters of batches, are sent as they are."""
        named = {"": gradient} if isinstance(gradient, torch.Tensor) else dict(gradient)
        if self._kept is None:
            self._kept = {name: tensor.detach().clone() for name, tensor in named.items()}
        elif {name: (t.shape, t.dtype) for name, t in named.items()} != {
            name: (t.shape, t.dtype) for name, t in self._kept.items()
        }:
            raise ConfigError(
                "a gradient is not of the model of those before", hint="one WorkerMomentum for each model"
            )
        else:
            for name, tensor in named.items():
                kept = self._kept[name]
                if kept.dtype.is_floating_point:
                    kept.mul_(self.beta).add_(tensor.detach() * (1.0 - self.beta))
                else:
                    kept.copy_(tensor)
        sent = {name: tensor.clone() for name, tensor in self._kept.items()}
        return sent[""] if isinstance(gradient, torch.Tensor) else sent

    def state_dict(self) -> dict[str, Any]:
        return {"beta": self.beta, "kept": None if self._kept is None else dict(self._kept)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.beta = float(state["beta"])
        kept = state["kept"]
        self._kept = None if kept is None else {name: tensor.clone() for name, tensor in kept.items()}
