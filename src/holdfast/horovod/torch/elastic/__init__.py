"""Elastic training with PyTorch: `elastic.run`, `elastic.TorchState`, `elastic.ElasticSampler`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.horovod.elastic import State as State
from holdfast.horovod.elastic import run_fn
from holdfast.horovod.torch.elastic.sampler import ElasticSampler as ElasticSampler
from holdfast.horovod.torch.elastic.state import ObjectState as ObjectState
from holdfast.horovod.torch.elastic.state import TorchState as TorchState


def run(func: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator for the function that trains; its first argument is the state."""
    return run_fn(func)


__all__ = ["ElasticSampler", "ObjectState", "State", "TorchState", "run"]
