"""Keras 3 on Holdfast: `distribute(model)`, after which model.fit trains with all workers. docs/how-to/keras.md.

On TensorFlow, JAX or torch, whichever Keras uses. Keras is imported when a name of this is first used; where it is not
installed, one sentence says what to do. Import this before the model is built: it lets TensorFlow and JAX compute with
one thread.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from holdfast.core.errors import ConfigError
from holdfast.integrations.variables import one_thread as one_thread

if TYPE_CHECKING:
    from holdfast.integrations.keras.distributing import distribute, run_of

__all__ = ["distribute", "run_of"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'holdfast.integrations.keras' has no attribute {name!r}")
    try:
        home = import_module("holdfast.integrations.keras.distributing")
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package not in ("keras", "tensorflow", "jax"):
            raise
        raise ConfigError(
            f"holdfast.integrations.keras.{name} needs Keras 3, and there is no {package} here",
            hint="pip install 'holdfast[keras]', and with it tensorflow-cpu or jax if Keras is to compute with them",
        ) from error
    return getattr(home, name)


def __dir__() -> list[str]:
    return sorted(__all__)
