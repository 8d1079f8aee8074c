"""Hugging Face on Holdfast: distribute(trainer) for transformers.Trainer, Accelerator for a loop of one's own.

docs/how-to/hugging-face.md. transformers and accelerate are imported when a name of this is first used; where one is
not installed, one sentence says what to do.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from holdfast.core.errors import ConfigError

if TYPE_CHECKING:
    from holdfast.integrations.huggingface.accelerating import Accelerator
    from holdfast.integrations.huggingface.distributing import distribute, run_of

_HOMES = {"distribute": "distributing", "run_of": "distributing", "Accelerator": "accelerating"}
__all__ = ["Accelerator", "distribute", "run_of"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'holdfast.integrations.huggingface' has no attribute {name!r}")
    try:
        home = import_module(f"holdfast.integrations.huggingface.{_HOMES[name]}")
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing not in ("transformers", "accelerate"):
            raise
        raise ConfigError(
            f"holdfast.integrations.huggingface.{name} needs {missing}, and there is no {missing} here",
            hint="pip install 'holdfast[huggingface]'",
        ) from error
    return getattr(home, name)


def __dir__() -> list[str]:
    return sorted(__all__)
