"""Callbacks of a fit that several workers make together: what only the leader does, and what travels with the state.

Every worker calls every callback once a step, with the same numbers. Those that print or write files do so on the
leader only. What Keras' own callbacks remember (the best value, since when, the history) travels to workers that join;
a person's callback may have state_dict and load_state_dict for the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy

_WRITERS = ("ProgbarLogger", "ModelCheckpoint", "CSVLogger", "TensorBoard", "RemoteMonitor")
_REMEMBER = ("History", "EarlyStopping", "ReduceLROnPlateau", "LearningRateScheduler")
_HOOKS = tuple(name for name in dir(keras.callbacks.Callback) if name.startswith("on_"))
_PLAIN = (bool, int, float, str, type(None))


class LeaderOnly(keras.callbacks.Callback):  # type: ignore[misc, unused-ignore]
    """A callback that is called on the leader. Who becomes the leader in the middle of an epoch begins it then."""

    def __init__(self, inner: Any, is_leader: Callable[[], bool]) -> None:
        super().__init__()
        self.inner = inner
        self._is_leader = is_leader
        self._begins: list[Callable[[], Any]] = []  # what the inner one was not told yet

    def set_params(self, params: Any) -> None:
        super().set_params(params)
        self.inner.set_params(params)

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        self.inner.set_model(model)

    def forward(self, hook: str, *arguments: Any, **named: Any) -> None:
        call = getattr(self.inner, hook)
        if hook in ("on_train_begin", "on_epoch_begin"):
            if hook == "on_epoch_begin":
                self._begins = [one for one in self._begins if getattr(one, "hook", "") != hook]
            self._begins.append(_Told(hook, lambda: call(*arguments, **named)))
        if not self._is_leader():
            return
        begins, self._begins = self._begins, []
        for begin in begins:
            begin()
        if hook not in ("on_train_begin", "on_epoch_begin"):
            call(*arguments, **named)


class _Told:
    def __init__(self, hook: str, call: Callable[[], Any]) -> None:
        self.hook = hook
        self._call = call

    def __call__(self) -> None:
        self._call()


def _forwarding(hook: str) -> Callable[..., None]:
    def forward(self: LeaderOnly, *arguments: Any, **named: Any) -> None:
        self.forward(hook, *arguments, **named)

    return forward


for _hook in _HOOKS:
    setattr(LeaderOnly, _hook, _forwarding(_hook))


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


def callbacks_of(given: Any, is_leader: Callable[[], bool]) -> list[Any]:
    """Those of a fit, with the history at their end."""
    if isinstance(given, keras.callbacks.CallbackList):
        given = given.callbacks
    found = [given] if isinstance(given, keras.callbacks.Callback) else list(given or ())
    for one in [one for one in found if isinstance(one, keras.callbacks.BackupAndRestore)]:
        warnings.warn("BackupAndRestore is left out: the run goes on by itself, and is kept in its checkpoints")
        found.remove(one)
    if not any(isinstance(one, keras.callbacks.History) for one in found):
        found.append(keras.callbacks.History())
    return [LeaderOnly(one, is_leader) if _is_one_of(one, _WRITERS) else one for one in found]


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
