"""Checkpoints: snapshots that reached storage, whole or not at all. See docs/decisions/0007.

`holdfast.checkpoint.save(uri, state)` and `load(uri)` are for scripts outside a run. Loaded when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.checkpoint.library import load, save
    from holdfast.checkpoint.saving.retention import Keep

__all__ = ["Keep", "load", "save"]

_HOMES = {
    "Keep": "holdfast.checkpoint.saving.retention",
    "load": "holdfast.checkpoint.library",
    "save": "holdfast.checkpoint.library",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'holdfast.checkpoint' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
