"""Horovod's API for PyTorch: `import holdfast.horovod.torch as hvd`."""

from __future__ import annotations

from holdfast.horovod.common.exceptions import HostsUpdatedInterrupt as HostsUpdatedInterrupt
from holdfast.horovod.torch import elastic as elastic
from holdfast.horovod.torch import mpi_ops as mpi_ops
from holdfast.horovod.torch.compression import Compression as Compression
from holdfast.horovod.torch.functions import allgather_object as allgather_object
from holdfast.horovod.torch.functions import broadcast_object as broadcast_object
from holdfast.horovod.torch.functions import broadcast_optimizer_state as broadcast_optimizer_state
from holdfast.horovod.torch.functions import broadcast_parameters as broadcast_parameters
from holdfast.horovod.torch.mpi_ops import *  # noqa: F403
from holdfast.horovod.torch.optimizer import DistributedOptimizer as DistributedOptimizer
from holdfast.horovod.torch.sync_batch_norm import SyncBatchNorm as SyncBatchNorm
