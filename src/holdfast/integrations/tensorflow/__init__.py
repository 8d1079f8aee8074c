"""TensorFlow loops on Holdfast: `join`, for models that tf.GradientTape trains. docs/how-to/tensorflow-loops.md.

TensorFlow is imported when `join` is first used; where it is not installed, one sentence says what to do. Import this
before the first tensor: it lets TensorFlow compute with one thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.integrations.names import load
from holdfast.integrations.variables import one_thread as one_thread

if TYPE_CHECKING:
    from holdfast.integrations.tensorflow.joining import join

_HINT = "pip install 'holdfast[tensorflow]'"
_HOMES = {"join": "joining"}
__all__ = ["join"]


def __getattr__(name: str) -> Any:
    return load(__name__, _HOMES, name, of=("tensorflow", "keras"), needs="TensorFlow", hint=_HINT)


def __dir__() -> list[str]:
    return sorted(__all__)
