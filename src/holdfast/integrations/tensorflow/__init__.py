"""TensorFlow loops on Holdfast: `join`, for models that tf.GradientTape trains. docs/how-to/tensorflow-loops.md.

TensorFlow is imported when `join` is first used; where it is not installed, one sentence says what to do. Import this
before the first tensor: it lets TensorFlow compute with one thread.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from holdfast.core.errors import ConfigError
from holdfast.integrations.variables import one_thread as one_thread

if TYPE_CHECKING:
    from holdfast.integrations.tensorflow.joining import join

__all__ = ["join"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'holdfast.integrations.tensorflow' has no attribute {name!r}")
    try:
        home = import_module("holdfast.integrations.tensorflow.joining")
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package not in ("tensorflow", "keras"):
            raise
        raise ConfigError(
            f"holdfast.integrations.tensorflow.{name} needs TensorFlow, and there is no {package} here",
            hint="pip install 'holdfast[tensorflow]'",
        ) from error
    return getattr(home, name)


def __dir__() -> list[str]:
    return sorted(__all__)
