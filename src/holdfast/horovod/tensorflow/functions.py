"""Variables and objects from one rank to all others, or from all to all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf
import torch

from holdfast.horovod.exchange.handle import Handle
from holdfast.horovod.exchange.words import Kind
from holdfast.horovod.process_sets import ProcessSet, global_process_set
from holdfast.horovod.tensorflow.bridge import on_host, spec_of, unconverted
from holdfast.horovod.tensorflow.without_effect import check
from holdfast.horovod.torch import functions as host
from holdfast.horovod.torch.handles import ask, refuse, submit, synchronize

Variable = Any  # tf.Variable or keras.Variable


def plain_variable(variable: Variable) -> Variable:
    """TensorFlow's own: Keras has variables that hold one."""
    inner = getattr(variable, "value", None)
    return inner if isinstance(inner, tf.Variable) else variable


@unconverted  # type: ignore[untyped-decorator, unused-ignore]
def broadcast_variables(
    variables: Iterable[Variable],
    root_rank: int,
    process_set: ProcessSet = global_process_set,
    inplace: bool = False,
) -> None:
    """All of them become the root's, in one collective. Also inside a tf.function."""
    ours = [plain_variable(one) for one in variables]
    if not ours:
        return
    values = [tf.convert_to_tensor(one) for one in ours]
    found = on_host(lambda brought: sent(brought, root_rank, process_set), values, [spec_of(one) for one in values])
    for variable, value in zip(ours, found, strict=True):
        variable.assign(value)


def broadcast_(
    variables: Sequence[Variable], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Sequence[Variable]:
    """In place."""
    broadcast_variables(variables, root_rank, process_set)
    return variables


def sent(tensors: list[torch.Tensor], root_rank: int, process_set: ProcessSet) -> list[torch.Tensor]:
    """The root's tensors, in one collective."""
    request = ask(Kind.BROADCAST, tensors, None, process_set, root=max(0, int(root_rank)))
    members = process_set.ranks or range(1)
    if root_rank not in members:
        refuse(request, f"root_rank is {root_rank}, which is no rank of {list(members)}")

    outputs = [torch.empty_like(one) for one in tensors]  # what is not given a place lies in memory that others reuse

    def finish(handle: Handle) -> list[torch.Tensor]:
        return handle.results

    results: list[torch.Tensor] = synchronize(submit(request, tensors, finish, outputs, soon=True))
    return results


def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: object = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    allow_pickle: bool = False,
) -> Any:
    """The root's object, on every rank. See holdfast.horovod.objects for what can travel."""
    return host.broadcast_object(obj, root_rank, name, process_set, allow_pickle)


def broadcast_object_fn(
    root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set, **without_effect: Any
) -> Callable[[Any], Any]:
    """A function that does broadcast_object with these arguments."""
    check(without_effect)
    return lambda obj: host.broadcast_object(obj, root_rank, name, process_set)


def allgather_object(
    obj: Any,
    session: object = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    allow_pickle: bool = False,
) -> list[Any]:
    """All ranks' objects, in their order."""
    return host.allgather_object(obj, name, process_set, allow_pickle)
