"""Whether compiled code computes: where it can be had, unless HOLDFAST_KERNELS asks for the other."""

from __future__ import annotations

import os
from collections.abc import Callable

from holdfast.core.errors import ConfigError

VARIABLE = "HOLDFAST_KERNELS"  # what tests force; "torch" stands for all that is not compiled


def native_wanted(can_be_had: Callable[[], bool], what: str, otherwise: str) -> bool:
    """`what` would be compiled, and `otherwise` computes instead. With "native" it fails where there is no compiler."""
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", "native", "torch"):
        raise ConfigError(
            f"{VARIABLE}={asked} is neither native nor torch", hint=f"unset {VARIABLE} to let Holdfast choose"
        )
    if asked != "torch" and can_be_had():
        return True
    if asked == "native":
        raise ConfigError(
            f"{VARIABLE}=native, and {what} could not be compiled here",
            hint=f"install a C compiler, or unset {VARIABLE} to compute with {otherwise}",
        )
    return False
