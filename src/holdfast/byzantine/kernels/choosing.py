"""Which kernels compute: compiled ones where they can be had for a dtype."""

from __future__ import annotations

import torch

from holdfast.byzantine.kernels import native
from holdfast.byzantine.kernels.blocked import BlockedKernels
from holdfast.byzantine.kernels.port import Kernels
from holdfast.native.choosing import native_wanted


def kernels(dtype: torch.dtype) -> Kernels:
    if native_wanted(lambda: native.available(dtype), "the kernels", "torch"):
        return native.NativeKernels()
    return BlockedKernels()
