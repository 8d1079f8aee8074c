"""The state of a training with PyTorch: models, optimizers and samplers, and plain values beside them.

`sync` brings all of it from rank 0 to the others, and is over only when every rank has it: what a rank is sent is kept
apart until then, so that a rank that is lost in the middle of it leaves nobody with half a state.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
import xxhash

from holdfast.horovod import objects
from holdfast.horovod.elastic import ObjectState as NeutralObjectState
from holdfast.horovod.torch.elastic.sampler import ElasticSampler
from holdfast.horovod.torch.functions import allgather_object, broadcast_object
from holdfast.horovod.torch.handles import barrier

_KEPT = (torch.nn.Module, torch.optim.Optimizer, ElasticSampler)


class ObjectState(NeutralObjectState):
    """Plain values; `allow_pickle` lets others travel, and trusts the workers of the run."""

    def __init__(self, allow_pickle: bool = False, **kwargs: Any) -> None:
        super().__init__(lambda value: broadcast_object(value, allow_pickle=allow_pickle), None, **kwargs)


class TorchState(ObjectState):
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
        self._parts: dict[str, Any] = {name: value for name, value in given.items() if _has_state(value)}
        self._saved_parts: dict[str, Any] = {}
        self._allow_pickle = allow_pickle
        for name, value in self._parts.items():
            super().__setattr__(name, value)
        self._save_parts()
        plain = {name: value for name, value in given.items() if name not in self._parts and value is not None}
        super().__init__(allow_pickle=allow_pickle, **plain)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name in self.__dict__.get("_parts", {}) and _has_state(value):
            self._parts[name] = value
            self._saved_parts[name] = copy.deepcopy(value.state_dict())

    def _save_parts(self) -> None:
        self._saved_parts = {name: copy.deepcopy(part.state_dict()) for name, part in self._parts.items()}

    def save(self) -> None:
        self._save_parts()
        super().save()

    def restore(self) -> None:
        for name, part in self._parts.items():
            part.load_state_dict(copy.deepcopy(self._saved_parts[name]))
        super().restore()

    def sync(self) -> None:
        now = {name: part.state_dict() for name, part in self._parts.items()}
        plain = {name: getattr(self, name) for name in self._saved_state}
        if not self._is_everybodys([now, plain]):
            state = broadcast_object([now, plain], allow_pickle=self._allow_pickle)
            barrier()  # everybody has it: only now does anybody take it over
            for name, part in self._parts.items():
                if state[0][name] is not now[name]:
                    part.load_state_dict(state[0][name])
            for name, value in state[1].items():
                setattr(self, name, value)
        for part in self._parts.values():
            if isinstance(part, ElasticSampler):
                part.reset()  # there may be another number of ranks
        self.save()

    def _is_everybodys(self, state: Any) -> bool:
        """Whether all ranks have one state already, as after a loss: then nothing needs to travel."""
        data = objects.encode(state, allow_pickle=self._allow_pickle).numpy()
        digests = allgather_object(xxhash.xxh3_128_hexdigest(data.data))
        return len(set(digests)) == 1


def _has_state(value: Any) -> bool:
    return isinstance(value, _KEPT) or (
        callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))
    )
