"""Which kernels compute: compiled ones where they can be had for a dtype, unless HOLDFAST_KERNELS=torch asks for the
others.
"""

from __future__ import annotations

import os

import torch

from holdfast.byzantine.kernels import native
from holdfast.byzantine.kernels.blocked import BlockedKernels
from holdfast.byzantine.kernels.port import Kernels
from holdfast.core.errors import ConfigError

VARIABLE = "HOLDFAST_KERNELS"  # what tests force; "native" fails where there is no compiler instead of falling back


def kernels(dtype: torch.dtype) -> Kernels:
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", "native", "torch"):
        raise ConfigError(
            f"{VARIABLE}={asked} is neither native nor torch", hint=f"unset {VARIABLE} to let Holdfast choose"
        )
    if asked != "torch" and native.available(dtype):
        return native.NativeKernels()
    if asked == "native":
        raise ConfigError(
            f"{VARIABLE}=native, and the kernels could not be compiled here",
            hint=f"install a C compiler, or unset {VARIABLE} to compute with torch",
        )
    return BlockedKernels()
