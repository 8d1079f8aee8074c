"""Parameters, optimizer state and objects from one rank to all others, or from all to all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from holdfast.core.errors import ConfigError
from holdfast.horovod import objects
from holdfast.horovod.basics import rank
from holdfast.horovod.exchange.words import Kind
from holdfast.horovod.process_sets import ProcessSet, global_process_set
from holdfast.horovod.torch.gathering import broadcast_async_
from holdfast.horovod.torch.handles import ask, submit, synchronize
from holdfast.horovod.world.runtime import runtime

Tensor = torch.Tensor
_NOTHING = torch.empty(0, dtype=torch.uint8)


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """In place: a state_dict, named_parameters() or parameters()."""
    if isinstance(params, Mapping):
        named: list[tuple[str | None, Any]] = sorted(params.items())
    elif isinstance(params, Iterable) and not isinstance(params, Tensor | str):
        named = [one if isinstance(one, tuple) else (None, one) for one in params]
    else:
        raise ValueError(f"parameters are a state_dict or a list, not {type(params).__name__}")
    tensors = [(name, one) for name, one in named if isinstance(one, Tensor)]
    handles = [broadcast_async_(one, root_rank, name, process_set) for name, one in tensors]
    for handle in handles:
        synchronize(handle)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """The whole state of the root's optimizer, options such as the learning rate included.

    An optimizer that has not stepped yet takes over what the root's has: nothing is stepped to make room.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError("the state of torch.optim.LBFGS cannot be broadcast")
    state = broadcast_object(optimizer.state_dict() if rank() == root_rank else None, root_rank)
    if rank() != root_rank:
        optimizer.load_state_dict(state)


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    allow_pickle: bool = False,
) -> Any:
    """The root's object, on every rank. See holdfast.horovod.objects for what can travel."""
    mine = rank() == root_rank
    parts = _everybodys(obj, name, process_set, brings=mine, allow_pickle=allow_pickle)
    if mine:
        return obj
    return objects.decode(torch.cat(parts), allow_pickle=allow_pickle)


def allgather_object(
    obj: Any,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    allow_pickle: bool = False,
) -> list[Any]:
    """All ranks' objects, in their order."""
    parts = _everybodys(obj, name, process_set, brings=True, allow_pickle=allow_pickle)
    return [objects.decode(one, allow_pickle=allow_pickle) for one in parts]


def _everybodys(
    obj: Any, name: str | None, process_set: ProcessSet, *, brings: bool, allow_pickle: bool
) -> list[Tensor]:
    """Bytes of all ranks. One whose object cannot travel fails, and so do the others, at once."""
    why: ConfigError | None = None
    data = _NOTHING
    if brings:
        try:
            data = objects.encode(obj, allow_pickle=allow_pickle)
        except ConfigError as error:
            why = error
    named = None if name is None else f"object.{name}"
    trouble = {"trouble": why.message} if why is not None else {}
    request = ask(Kind.ALLGATHER, [data], named, process_set, **trouble)
    if why is not None:
        runtime().world.exchange.submit(request)
        raise why
    found, received = synchronize(submit(request, [data], _with_splits, soon=True))
    return list(torch.split(found, received))


def _with_splits(handle: Any) -> tuple[Tensor, list[int]]:
    return handle.results[0], list(handle.splits)
