"""Horovod's API for TensorFlow 2: `import holdfast.horovod.tensorflow as hvd`."""

from __future__ import annotations

from typing import Any

from holdfast.horovod.extras import need

need("tensorflow", "holdfast.horovod.tensorflow")

from holdfast.horovod.common.exceptions import HostsUpdatedInterrupt as HostsUpdatedInterrupt  # noqa: E402
from holdfast.horovod.tensorflow import elastic as elastic  # noqa: E402
from holdfast.horovod.tensorflow import mpi_ops as mpi_ops  # noqa: E402
from holdfast.horovod.tensorflow.compression import Compression as Compression  # noqa: E402
from holdfast.horovod.tensorflow.functions import allgather_object as allgather_object  # noqa: E402
from holdfast.horovod.tensorflow.functions import broadcast_object as broadcast_object  # noqa: E402
from holdfast.horovod.tensorflow.functions import broadcast_object_fn as broadcast_object_fn  # noqa: E402
from holdfast.horovod.tensorflow.functions import broadcast_variables as broadcast_variables  # noqa: E402
from holdfast.horovod.tensorflow.gradients import DistributedGradientTape as DistributedGradientTape  # noqa: E402
from holdfast.horovod.tensorflow.gradients import (  # noqa: E402
    PartialDistributedGradientTape as PartialDistributedGradientTape,
)
from holdfast.horovod.tensorflow.mpi_ops import *  # noqa: E402, F403
from holdfast.horovod.tensorflow.optimizer import DistributedOptimizer as DistributedOptimizer  # noqa: E402
from holdfast.horovod.tensorflow.optimizer import PartialDistributedOptimizer as PartialDistributedOptimizer  # noqa: E402
from holdfast.horovod.tensorflow.sessions import BroadcastGlobalVariablesHook as BroadcastGlobalVariablesHook  # noqa: E402
from holdfast.horovod.tensorflow.sessions import broadcast_global_variables as broadcast_global_variables  # noqa: E402


def __getattr__(name: str) -> Any:
    """What needs Keras, which takes a while to import."""
    if name != "SyncBatchNormalization":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from holdfast.horovod.tensorflow.sync_batch_norm import SyncBatchNormalization

    return SyncBatchNormalization
