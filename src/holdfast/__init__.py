"""Holdfast keeps deep-learning training going, exactly, while the machines, networks and disks under it fail.

The public names are loaded when they are first used, so that `holdfast --help` starts without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast import checkpoint as checkpoint
    from holdfast.core.errors import ConfigError, Evicted, HoldfastError, Stopped
    from holdfast.run.joining import join
    from holdfast.run.loop import Run, Step

__version__ = "0.1.0"
__all__ = ["ConfigError", "Evicted", "HoldfastError", "Run", "Step", "Stopped", "__version__", "join"]

_HOMES = {
    "ConfigError": "holdfast.core.errors",
    "Evicted": "holdfast.core.errors",
    "HoldfastError": "holdfast.core.errors",
    "Stopped": "holdfast.core.errors",
    "join": "holdfast.run.joining",
    "Run": "holdfast.run.loop",
    "Step": "holdfast.run.loop",
}


def __getattr__(name: str) -> Any:
    if name == "checkpoint":  # a small library of its own
        return import_module("holdfast.checkpoint")
    if name not in _HOMES:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
