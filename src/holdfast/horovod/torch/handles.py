"""Collectives of torch tensors: submitted to the exchange, known to scripts by a number until they are waited for.

Tensors of a GPU go by way of the host's memory. Any thread may call; numbers are given out under a lock.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from holdfast.horovod.exchange import arithmetic
from holdfast.horovod.exchange.engine import Exchange
from holdfast.horovod.exchange.handle import Handle
from holdfast.horovod.exchange.words import Kind, Op, Request, Shape
from holdfast.horovod.process_sets import ProcessSet, global_process_set, number_of
from holdfast.horovod.world.runtime import runtime
from holdfast.state.layout import DTYPES

Finish = Callable[[Handle], Any]
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_numbers = itertools.count(1)
_lock = threading.Lock()
_pending: dict[int, tuple[Exchange, Handle, Finish]] = {}


@lru_cache(maxsize=8192)
def _request(
    kind: Kind,
    name: str,
    members: int,
    dtypes: tuple[torch.dtype, ...],
    shapes: tuple[Shape, ...],
    more: tuple[tuple[str, Any], ...],
) -> Request:
    """What is asked for; cached, since a training asks for the same again and again."""
    fields: dict[str, Any] = dict(more)
    op, trouble = fields.get("op", Op.SUM), fields.pop("trouble", "")
    for dtype in dtypes:
        if dtype not in _DTYPE_NAMES:
            trouble = trouble or f"{dtype} cannot be exchanged"
        elif kind in (Kind.ALLREDUCE, Kind.REDUCESCATTER):
            trouble = trouble or arithmetic.check_op(op, dtype)
    names = tuple(_DTYPE_NAMES.get(dtype, "uint8") for dtype in dtypes)
    return Request(kind=kind, name=name, members=members, dtypes=names, shapes=shapes, trouble=trouble, **fields)


def ask(
    kind: Kind,
    tensors: Sequence[torch.Tensor],
    name: str | None,
    process_set: ProcessSet,
    **more: Any,
) -> Request:
    return _request(
        kind,
        name or "",
        number_of(process_set),
        tuple([tensor.dtype for tensor in tensors]),
        tuple([tuple(tensor.shape) for tensor in tensors]),
        tuple(more.items()),
    )


def where_they_came_from(tensors: Sequence[torch.Tensor], *, grouped: bool) -> Finish:
    """Each result on the device of its tensor; one of them, if there is no group."""

    def finish(handle: Handle) -> Any:
        found = [result.to(tensor.device) for result, tensor in zip(handle.results, tensors, strict=True)]
        return found if grouped else found[0]

    return finish


def submit(
    request: Request,
    tensors: Sequence[torch.Tensor],
    finish: Finish,
    outputs: Sequence[torch.Tensor] | None = None,
    *,
    soon: bool = False,
) -> int:
    """A number for `poll` and `synchronize`. Results go into `outputs` where they are of this host."""
    exchange = runtime().world.exchange
    near = [tensor.detach() if tensor.device.type == "cpu" else tensor.detach().cpu() for tensor in tensors]
    straight = outputs if outputs is None or all(one.device.type == "cpu" for one in outputs) else None
    handle = exchange.submit(request, near, straight, soon=soon)
    with _lock:
        number = next(_numbers)
        _pending[number] = (exchange, handle, finish)
    return number


def refuse(request: Request, why: str) -> None:
    """ValueError here, and the others are told, so that they do not wait for this rank."""
    runtime().world.exchange.submit(Request(**{**request.__dict__, "trouble": why}))
    raise ValueError(why)


def poll(handle: int) -> bool:
    """Whether it is done: `synchronize` would return at once."""
    found = _pending.get(handle)
    return True if found is None else found[0].poll(found[1])


def synchronize(handle: int) -> Any:
    """Wait for a collective, and return what came of it. HorovodInternalError if it failed."""
    with _lock:
        found = _pending.pop(handle, None)
    if found is None:
        return None
    exchange, submitted, finish = found
    return finish(exchange.synchronize(submitted))


def join(device: int = -1) -> int:
    """This rank has no more data: until all have joined, its part in the others' allreduces is zero.

    Returns the rank that was the last to join.
    """
    request = Request(kind=Kind.JOIN, name="join", stamp=time.time_ns())
    exchange = runtime().world.exchange
    exchange.synchronize(exchange.submit(request, soon=True))
    return exchange.last_joined


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """All ranks of the set are at this line."""
    exchange = runtime().world.exchange
    exchange.synchronize(exchange.submit(ask(Kind.BARRIER, (), None, process_set), soon=True))
