"""Horovod's API for Keras 3 on TensorFlow: `import holdfast.horovod.keras as hvd`."""

from __future__ import annotations

from holdfast.horovod.extras import need

need("tensorflow", "holdfast.horovod.keras")
need("keras", "holdfast.horovod.keras")

from holdfast.horovod.common.exceptions import HorovodInternalError as HorovodInternalError  # noqa: E402
from holdfast.horovod.common.exceptions import HostsUpdatedInterrupt as HostsUpdatedInterrupt  # noqa: E402
from holdfast.horovod.keras import callbacks as callbacks  # noqa: E402
from holdfast.horovod.keras import elastic as elastic  # noqa: E402
from holdfast.horovod.keras.models import broadcast_global_variables as broadcast_global_variables  # noqa: E402
from holdfast.horovod.keras.models import load_model as load_model  # noqa: E402
from holdfast.horovod.keras.values import allgather as allgather  # noqa: E402
from holdfast.horovod.keras.values import allreduce as allreduce  # noqa: E402
from holdfast.horovod.keras.values import broadcast as broadcast  # noqa: E402
from holdfast.horovod.keras.values import reducescatter as reducescatter  # noqa: E402
from holdfast.horovod.tensorflow.compression import Compression as Compression  # noqa: E402
from holdfast.horovod.tensorflow.functions import allgather_object as allgather_object  # noqa: E402
from holdfast.horovod.tensorflow.functions import broadcast_object as broadcast_object  # noqa: E402
from holdfast.horovod.tensorflow.functions import broadcast_variables as broadcast_variables  # noqa: E402
from holdfast.horovod.tensorflow.mpi_ops import Adasum as Adasum  # noqa: E402
from holdfast.horovod.tensorflow.mpi_ops import Average as Average  # noqa: E402
from holdfast.horovod.tensorflow.mpi_ops import ProcessSet as ProcessSet  # noqa: E402
from holdfast.horovod.tensorflow.mpi_ops import Sum as Sum  # noqa: E402
from holdfast.horovod.tensorflow.mpi_ops import (  # noqa: E402
    add_process_set,
    barrier,
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    join,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from holdfast.horovod.tensorflow.optimizer import DistributedOptimizer as DistributedOptimizer  # noqa: E402
from holdfast.horovod.tensorflow.optimizer import PartialDistributedOptimizer as PartialDistributedOptimizer  # noqa: E402

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "HorovodInternalError",
    "HostsUpdatedInterrupt",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "stop_timeline",
]
