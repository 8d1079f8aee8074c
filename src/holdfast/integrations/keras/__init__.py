"""Keras 3 on Holdfast: `distribute(model)`, after which model.fit trains with all workers. docs/how-to/keras.md.

On TensorFlow, JAX or torch, whichever Keras uses. Keras is imported when a name of this is first used; where it is not
installed, one sentence says what to do. Import this before the model is built: it lets TensorFlow and JAX compute with
one thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.integrations.names import load
from holdfast.integrations.variables import one_thread as one_thread

if TYPE_CHECKING:
    from holdfast.integrations.keras.distributing import distribute, run_of

_HINT = "pip install 'holdfast[keras]', and with it tensorflow-cpu or jax if Keras is to compute with them"
_HOMES = {"distribute": "distributing", "run_of": "distributing"}
__all__ = ["distribute", "run_of"]


def __getattr__(name: str) -> Any:
    return load(__name__, _HOMES, name, of=("keras", "tensorflow", "jax"), needs="Keras 3", hint=_HINT)


def __dir__() -> list[str]:
    return sorted(__all__)
