"""Holdfast keeps deep-learning training going, exactly, while the machines, networks and disks under it fail.

The public names are loaded when they are first used, so that `holdfast --help` starts without torch. Nothing else is
imported here: the command line is ready for Ctrl-C only after this file.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing's own takes longer to import than the rest of the start
if TYPE_CHECKING:
    from typing import Any

    from holdfast import byzantine as byzantine
    from holdfast import checkpoint as checkpoint
    from holdfast import data as data
    from holdfast import tables as tables
    from holdfast.checkpoint.settings import Checkpoints
    from holdfast.core.errors import ConfigError, Evicted, HoldfastError, Stopped
    from holdfast.engine.api.joining import join
    from holdfast.engine.api.run import Run
    from holdfast.engine.api.step import Step
    from holdfast.engine.ranks.group import Group, group
    from holdfast.engine.ranks.norm import clip_grad_norm_
    from holdfast.launching.launch import launch
    from holdfast.modes.asynchronous import Async
    from holdfast.modes.elastic import Elastic
    from holdfast.modes.exact import Exact
    from holdfast.tables.module import EmbeddingTable

__version__ = "0.1.0"
__all__ = [
    "Async",
    "Checkpoints",
    "ConfigError",
    "Elastic",
    "EmbeddingTable",
    "Evicted",
    "Exact",
    "Group",
    "HoldfastError",
    "Run",
    "Step",
    "Stopped",
    "__version__",
    "clip_grad_norm_",
    "group",
    "join",
    "launch",
]

_HOMES = {
    "Async": "holdfast.modes.asynchronous",
    "Checkpoints": "holdfast.checkpoint.settings",
    "ConfigError": "holdfast.core.errors",
    "Elastic": "holdfast.modes.elastic",
    "EmbeddingTable": "holdfast.tables.module",
    "Evicted": "holdfast.core.errors",
    "Exact": "holdfast.modes.exact",
    "HoldfastError": "holdfast.core.errors",
    "Stopped": "holdfast.core.errors",
    "Group": "holdfast.engine.ranks.group",
    "group": "holdfast.engine.ranks.group",
    "clip_grad_norm_": "holdfast.engine.ranks.norm",
    "join": "holdfast.engine.api.joining",
    "launch": "holdfast.launching.launch",
    "Run": "holdfast.engine.api.run",
    "Step": "holdfast.engine.api.step",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in ("byzantine", "checkpoint", "data", "tables"):  # small libraries of their own
        return import_module(f"holdfast.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
