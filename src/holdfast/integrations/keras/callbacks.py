"""Callbacks of a fit that several workers make together: what only the leader does, and what travels with the state.

Every worker calls every callback once a step, with the same numbers. Those that print or write files do so on the
leader only (leading.py). What Keras' own callbacks remember (the best value, since when, the history) travels to
workers that join; a person's callback may have state_dict and load_state_dict for the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy

from holdfast.integrations.keras.leading import led

_WRITERS = ("ProgbarLogger", "ModelCheckpoint", "CSVLogger", "TensorBoard", "RemoteMonitor")
_REMEMBER = ("History", "EarlyStopping", "ReduceLROnPlateau", "LearningRateScheduler")
_PLAIN = (bool, int, float, str, type(None))


class CallbackState:
    """What callbacks remember, as an extra."""

    def __init__(self, callbacks: Sequence[Any]) -> None:
        self._callbacks = [one for one in callbacks if _remembers(one)]

    def state_dict(self) -> dict[str, Any]:
        return {f"{number} {type(one).__name__}": _state(one) for number, one in enumerate(self._callbacks)}

    def load_state_dict(self, state: Any) -> None:
        if set(state) != set(self.state_dict()):
            raise ValueError(f"the run has the callbacks {', '.join(state)}")
        for number, one in enumerate(self._callbacks):
            values = state[f"{number} {type(one).__name__}"]
            if hasattr(one, "load_state_dict"):
                one.load_state_dict(values)
            else:
                vars(one).update(values)


def callbacks_of(given: Any, is_leader: Callable[[], bool], steps_done: Callable[[], int]) -> list[Any]:
    """Those of a fit, with the history at their end."""
    if isinstance(given, keras.callbacks.CallbackList):
        given = given.callbacks
    found = [given] if isinstance(given, keras.callbacks.Callback) else list(given or ())
    for one in [one for one in found if isinstance(one, keras.callbacks.BackupAndRestore)]:
        warnings.warn("BackupAndRestore is left out: the run goes on by itself, and is kept in its checkpoints")
        found.remove(one)
    if not any(isinstance(one, keras.callbacks.History) for one in found):
        found.append(keras.callbacks.History())
    return [led(one, is_leader, steps_done) if _is_one_of(one, _WRITERS) else one for one in found]


def settle_monitors(callbacks: Sequence[Any]) -> None:
    """Let those that compare values find out now whether less is better, and not at the end of their first epoch.

    They turn the sign of `min_delta` with it, which is in the state: a worker that joins would turn it once more.
    """
    for one in callbacks:
        if getattr(one, "monitor_op", True) is None and hasattr(one, "_set_monitor_op"):
            one._set_monitor_op()


def _is_one_of(callback: Any, names: Sequence[str]) -> bool:
    return any(cls.__name__ in names and cls.__module__.startswith("keras.") for cls in type(callback).__mro__)


def _remembers(callback: Any) -> bool:
    return callable(getattr(callback, "state_dict", None)) or _is_one_of(callback, _REMEMBER)


def _state(callback: Any) -> dict[str, Any]:
    if callable(getattr(callback, "state_dict", None)):
        return dict(callback.state_dict())
    own = ("model", "_model", "params", "validation_data")
    return {name: _copy(value) for name, value in vars(callback).items() if name not in own and _is_plain(value)}


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, (*_PLAIN, numpy.ndarray, numpy.generic))


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copy(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([_copy(item) for item in value])
    return value.item() if isinstance(value, numpy.generic) else value
