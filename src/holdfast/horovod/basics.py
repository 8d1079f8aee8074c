"""What every framework's face offers alike: init, ranks and sizes, the timeline, what is built in. Horovod's names."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.horovod import process_sets as sets
from holdfast.horovod.exchange.sharding import shards_of
from holdfast.horovod.exchange.words import Op
from holdfast.horovod.world.runtime import runtime

Average, Sum, Adasum, Min, Max, Product = Op.AVERAGE, Op.SUM, Op.ADASUM, Op.MIN, Op.MAX, Op.PRODUCT


def init(comm: object = None, process_sets: Sequence[sets.ProcessSet | Sequence[int]] | str | None = None) -> None:
    """Become a rank: waits until all members of the world are there. A second call does nothing."""
    if comm is not None:
        raise ValueError("hvd.init(comm) needs MPI, which is not used here: leave the communicator out")
    if runtime().is_initialized:
        return
    runtime().init()
    sets.setup(() if process_sets is None or isinstance(process_sets, str) else process_sets)


def shutdown() -> None:
    """Leave the world. `init` may be called again."""
    runtime().shutdown()


def is_initialized() -> bool:
    return runtime().is_initialized


def rank() -> int:
    return runtime().world.rank


def size() -> int:
    return runtime().world.size


def local_rank() -> int:
    return runtime().world.local_rank


def local_size() -> int:
    return runtime().world.local_size


def cross_rank() -> int:
    return runtime().world.cross_rank


def cross_size() -> int:
    return runtime().world.cross_size


def is_homogeneous() -> bool:
    """Whether every host has the same number of ranks."""
    return runtime().world.homogeneous


def num_shards(process_set: sets.ProcessSet = sets.global_process_set) -> int:
    """Of a step: HOLDFAST_SHARDS, or one for each rank. Not one of Horovod's names."""
    return runtime().shards or len(sets.ranks_of(process_set))


def shards(process_set: sets.ProcessSet = sets.global_process_set) -> range:
    """This rank's shards of a step: their numbers, of num_shards(). Not one of Horovod's names."""
    ranks = list(sets.ranks_of(process_set))
    return shards_of(ranks.index(rank()), len(ranks), num_shards(process_set))


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Rank 0 writes a Chrome trace of its collectives to this file, from now on."""
    runtime().start_timeline(file_path, mark_cycles=mark_cycles)


def stop_timeline() -> None:
    runtime().stop_timeline()


def mpi_threads_supported() -> bool:
    return False


def mpi_enabled() -> bool:
    return False


def mpi_built() -> bool:
    return False


def gloo_enabled() -> bool:
    """True: scripts ask this to know whether collectives work without MPI, and they do. No gloo is used."""
    return True


def gloo_built() -> bool:
    return True


def nccl_built() -> int:
    return 0


def ddl_built() -> bool:
    return False


def ccl_built() -> bool:
    return False


def cuda_built() -> bool:
    """False: tensors of a GPU are exchanged by way of the host's memory."""
    return False


def rocm_built() -> bool:
    return False
