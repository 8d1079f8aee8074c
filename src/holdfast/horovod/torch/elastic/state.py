"""The state of a training with PyTorch: models, optimizers and samplers, and plain values beside them."""

from __future__ import annotations

import copy
from typing import Any

import torch

from holdfast.horovod.torch.elastic.parts import ObjectState as ObjectState
from holdfast.horovod.torch.elastic.parts import PartsState
from holdfast.horovod.torch.elastic.sampler import ElasticSampler

_KEPT = (torch.nn.Module, torch.optim.Optimizer, ElasticSampler)


class TorchState(PartsState):
    """Whatever has a state_dict among the arguments is kept by it; the rest are plain values.

    All are attributes: state.model, state.optimizer, state.epoch.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        allow_pickle: bool = False,
        **kwargs: Any,
    ) -> None:
        given = {"model": model, "optimizer": optimizer, **kwargs}
        parts = {name: value for name, value in given.items() if _has_state(value)}
        for name, value in parts.items():
            super().__setattr__(name, value)
        plain = {name: value for name, value in given.items() if name not in parts and value is not None}
        super().__init__(parts, plain, allow_pickle=allow_pickle)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in self.__dict__.get("_parts", {}) and _has_state(value):
            self._parts[name] = value
            self._saved_parts[name] = copy.deepcopy(value.state_dict())

    def synced(self) -> None:
        for part in self._parts.values():
            if isinstance(part, ElasticSampler):
                part.reset()  # there may be another number of ranks


def _has_state(value: Any) -> bool:
    return isinstance(value, _KEPT) or (
        callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
    )
