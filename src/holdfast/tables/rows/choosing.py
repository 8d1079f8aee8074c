"""Which rows: compiled ones where they can be had, unless HOLDFAST_KERNELS asks for the others."""

from __future__ import annotations

import os

from holdfast.core.errors import ConfigError
from holdfast.tables.rows import native
from holdfast.tables.rows.plain import PlainKernels
from holdfast.tables.rows.port import Kernels

VARIABLE = "HOLDFAST_KERNELS"  # the same as for aggregators: "torch" stands for everything that is not compiled


def kernels() -> Kernels:
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", "native", "torch"):
        raise ConfigError(
            f"{VARIABLE}={asked} is neither native nor torch", hint=f"unset {VARIABLE} to let Holdfast choose"
        )
    if asked != "torch" and native.available():
        return native.NativeKernels()
    if asked == "native":
        raise ConfigError(
            f"{VARIABLE}=native, and the rows of tables could not be compiled here",
            hint=f"install a C compiler, or unset {VARIABLE} to compute with numpy",
        )
    return PlainKernels()
