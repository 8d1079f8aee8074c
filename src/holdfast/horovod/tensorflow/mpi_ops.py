"""The collectives and what belongs to them, under the module name that Horovod's scripts know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
import torch

from holdfast.horovod import basics
from holdfast.horovod.basics import Adasum as Adasum
from holdfast.horovod.basics import Average as Average
from holdfast.horovod.basics import Max as Max
from holdfast.horovod.basics import Min as Min
from holdfast.horovod.basics import Product as Product
from holdfast.horovod.basics import Sum as Sum
from holdfast.horovod.basics import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from holdfast.horovod.common.exceptions import HorovodInternalError as HorovodInternalError
from holdfast.horovod.process_sets import ProcessSet as ProcessSet
from holdfast.horovod.process_sets import add_process_set, global_process_set, remove_process_set
from holdfast.horovod.tensorflow.bridge import on_host
from holdfast.horovod.tensorflow.functions import broadcast_
from holdfast.horovod.tensorflow.gathering import allgather, alltoall, broadcast, grouped_allgather
from holdfast.horovod.tensorflow.reductions import (
    allreduce,
    grouped_allreduce,
    grouped_reducescatter,
    reducescatter,
)
from holdfast.horovod.torch.handles import barrier, join
from holdfast.horovod.world.runtime import runtime


def _when_it_runs(number: Callable[[], int]) -> Any:
    """A number that a graph looks up each time: the world may have formed anew since it was made."""
    spec = (tf.int32, tf.TensorShape([]))
    return on_host(lambda _: [torch.tensor(number(), dtype=torch.int32)], [], [spec])[0]


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    return _when_it_runs(lambda: len(_members(process_set_id)))


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    return _when_it_runs(lambda: int(basics.rank() in _members(process_set_id)))


def _members(number: int) -> tuple[int, ...]:
    world = runtime().world
    return tuple(range(world.size)) if number == 0 else world.sets[number]


def local_size_op(name: str | None = None) -> Any:
    return _when_it_runs(basics.local_size)


def rank_op(name: str | None = None) -> Any:
    return _when_it_runs(basics.rank)


def local_rank_op(name: str | None = None) -> Any:
    return _when_it_runs(basics.local_rank)


__all__ = [
    "Adasum",
    "Average",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "size_op",
    "start_timeline",
    "stop_timeline",
]
