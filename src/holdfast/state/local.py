"""What of a tensor is in this process: of one that is sharded over the ranks of a group, this rank's part.

Snapshots, sums and digests are made of parts. Whole tensors are put together only where somebody asks for one, by all
ranks of the group at the same line. Owns nothing.
"""

from __future__ import annotations

from typing import Any

import torch


def local(tensor: torch.Tensor) -> torch.Tensor:
    """By reference: what is written into it is in the tensor."""
    return getattr(tensor, "_local_tensor", tensor)


def is_sharded(tensor: Any) -> bool:
    return hasattr(tensor, "_local_tensor")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of it. A collective where the tensor is sharded."""
    found: Any = tensor
    return found.full_tensor() if is_sharded(tensor) else tensor


def as_part_of(like: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """This rank's part of a tensor that is sharded as `like`; `value` itself where that is not sharded, or where it is
    no such part, as a count of steps is none."""
    if not is_sharded(like) or is_sharded(value) or not value.dim() or value.shape != local(like).shape:
        return value
    from torch.distributed.tensor import DTensor

    found: Any = like
    where = {"shape": found.shape, "stride": found.stride(), "run_check": False}
    part: torch.Tensor = DTensor.from_local(value, found.device_mesh, found.placements, **where)
    return part


def sharding_modules(model: torch.nn.Module) -> list[Any]:
    """Those that gather their parameters for a forward pass. Without a backward they are left gathered: `reshard` them
    before parameters are looked for."""
    return [module for module in model.modules() if hasattr(type(module), "set_custom_reduce_scatter")]
