"""holdfast.group: the ranks that this process shards its model with, and their mesh for fully_shard."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from holdfast.core.errors import ConfigError
from holdfast.engine.ranks.used import UsedParameters
from holdfast.placement.launched import environment_of_process
from holdfast.placement.ranks import ranks_here
from holdfast.state.local import is_sharded

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from holdfast.engine.ranks.scatter import TreeScatter

DIMENSION = "shard"
NEEDED = "set_custom_reduce_scatter"  # of FSDPModule: what torch must have for groups
UNUSED = "set_reduce_scatter_unused_params"
_SHARD = "group = holdfast.group(); fully_shard(model, mesh=group.mesh)"


@dataclass(frozen=True)
class Group:
    """`mesh` is for fully_shard. In a run of one, or without --ranks, a group is one rank."""

    mesh: DeviceMesh
    rank: int
    ranks: int


_group: Group | None = None
_scatters: list[TreeScatter] = []  # of the model that is sharded
_used: list[UsedParameters] = []  # of that model, where other ranks have parts of it


def group() -> Group:
    """The group that this process is in. Call it on every rank, before the model is sharded."""
    global _group
    if _group is None:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        if not dist.is_available() or not hasattr(_fsdp_module(), NEEDED):
            raise ConfigError(
                f"torch {torch.__version__} cannot take another reduce-scatter for fully_shard",
                hint="groups of ranks need torch 2.9 or newer",
            )
        if dist.is_initialized():
            raise ConfigError(
                "torch.distributed was initialised before holdfast.group()",
                hint="leave init_process_group out: holdfast.group() makes the world of the group's ranks",
            )
        here = ranks_here()
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a group is on one host, and nobody else is to knock
        dist.init_process_group("gloo", store=_store(here.count), rank=here.rank, world_size=here.count)
        mesh = init_device_mesh("cpu", (here.count,), mesh_dim_names=(DIMENSION,))
        _group = Group(mesh, here.rank, here.count)
    return _group


def _fsdp_module() -> Any:
    try:
        from torch.distributed.fsdp import FSDPModule
    except ImportError:
        return None
    return FSDPModule


def _store(count: int) -> Any:
    import torch.distributed as dist

    environment = environment_of_process()
    if count == 1 or environment is None:
        return dist.HashStore()  # type: ignore[attr-defined]
    # In the run's own directory of sockets, which only this user can open; the last rank that lets go deletes it.
    path = environment.socket_dir / f"{environment.worker.partition('@')[0]}.world"
    return dist.FileStore(str(path), count)  # type: ignore[attr-defined]


def take_sums(model: torch.nn.Module) -> bool:
    """Make a model that is sharded over the group leave sums in tree order, as Holdfast adds them up. False: it is not
    sharded. ConfigError if it is sharded in another way."""
    parameters, here = list(model.parameters()), ranks_here()
    sharded = [parameter for parameter in parameters if is_sharded(parameter)]
    if not sharded:
        if here.count > 1:
            raise ConfigError(
                f"--ranks {here.count} asks for groups that shard the model, and the model is not sharded", hint=_SHARD
            )
        return False
    if _group is None:
        raise ConfigError("the model is sharded over a mesh that is not the group's", hint=_SHARD)
    others = sum(not is_sharded(one) or one.device_mesh != _group.mesh for one in parameters)  # type: ignore[attr-defined]
    if others:
        raise ConfigError(
            f"{others} of {len(parameters)} parameters are not sharded over the group's mesh alone",
            hint=f"{_SHARD}, last of all for the whole model",
        )
    if any(parameter.placements[0].dim != 0 for parameter in sharded):  # type: ignore[attr-defined]
        raise ConfigError(
            "a parameter is sharded along another dimension than its first", hint="leave shard_placement_fn out"
        )
    from holdfast.engine.ranks.scatter import TreeScatter

    _scatters.clear()
    _used[:] = [UsedParameters(model)] if here.count > 1 else []
    for module in model.modules():
        if hasattr(module, NEEDED):
            fsdp: Any = module
            fsdp.set_force_sum_reduction_for_comms(True)
            fsdp.set_gradient_divide_factor(1.0)
            _scatters.append(TreeScatter(_dtype_of(module)))
            fsdp.set_custom_reduce_scatter(_scatters[-1])
            if here.count > 1 and hasattr(fsdp, UNUSED):  # a parameter that some leaves use and some do not
                fsdp.set_reduce_scatter_unused_params(True)
    return True


def _dtype_of(module: torch.nn.Module) -> torch.dtype | None:
    """Of the parameters that this module gathers itself, which FSDP2 wants to be alike where they are trained."""
    below = {
        id(one)
        for inner in module.modules()
        if inner is not module and hasattr(inner, NEEDED)
        for one in inner.parameters()
    }
    own = [one for one in module.parameters() if id(one) not in below]
    return next((one.dtype for one in own if one.requires_grad), own[0].dtype if own else None)


def open_leaf(weight: float) -> None:
    """A shard begins: what the gradients of this rank's leaf count for."""
    for scatter in _scatters:
        scatter.open(weight)
    for used in _used:
        used.open()


def has_say(parameter: torch.Tensor, grad: torch.Tensor) -> bool:
    """Whether this rank's leaf has a gradient of a parameter: FSDP2 gives zeros to what it does not use."""
    return not _used or any(used.has_say(parameter, grad) for used in _used)


def found_by_any(words: str) -> str:
    """The same on all ranks: what this one has found, or that another has found something. A collective."""
    import torch.distributed as dist

    if _group is None or _group.ranks == 1:
        return words
    flag = torch.tensor([int(bool(words))])
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=_group.mesh.get_group())
    return words or ("a gradient on another rank" if flag.item() else "")
