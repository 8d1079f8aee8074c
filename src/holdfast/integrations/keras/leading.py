"""Callbacks that write for everybody: what they write is written by the leader, and by the next one if that is lost.

    LeaderOnly    is called on the leader alone: progress bars, TensorBoard
    LeaderLog     the same for a CSVLogger: the next leader goes on with the file
    LeaderSaves   a ModelCheckpoint: every worker decides alike what is to be saved, and the leader saves it

A leader that is lost may have written less than the others have done by then, or more than they will remember: the next
one finds out from the file.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras

_BEGINS = ("on_train_begin", "on_epoch_begin")
_DECIDING = ("best", "_batches_seen_since_last_saving", "_last_batch_seen", "_current_epoch")
HOOKS = tuple(name for name in dir(keras.callbacks.Callback) if name.startswith("on_"))


class _Wrapped(keras.callbacks.Callback):  # type: ignore[misc, unused-ignore]
    """Another callback, each of whose hooks comes to `forward`."""

    def __init__(self, inner: Any, is_leader: Callable[[], bool]) -> None:
        super().__init__()
        self.inner = inner
        self._is_leader = is_leader

    def set_params(self, params: Any) -> None:
        super().set_params(params)
        self.inner.set_params(params)

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        self.inner.set_model(model)

    def forward(self, hook: str, *arguments: Any, **named: Any) -> None:
        raise NotImplementedError


def _forwarding(hook: str) -> Callable[..., None]:
    def forward(self: _Wrapped, *arguments: Any, **named: Any) -> None:
        self.forward(hook, *arguments, **named)

    return forward


for _hook in HOOKS:
    setattr(_Wrapped, _hook, _forwarding(_hook))


class LeaderOnly(_Wrapped):
    """A callback that is called on the leader. Who becomes the leader in the middle of an epoch begins it then.

    Nothing is begun before the first step: with it comes how far the run is.
    """

    def __init__(self, inner: Any, is_leader: Callable[[], bool]) -> None:
        super().__init__(inner, is_leader)
        self._begins: list[tuple[str, Callable[[], Any]]] = []  # what the inner one was not told yet

    def forward(self, hook: str, *arguments: Any, **named: Any) -> None:
        call = getattr(self.inner, hook)
        if hook in _BEGINS:
            self._begins = [one for one in self._begins if one[0] != hook]
            self._begins.append((hook, lambda: call(*arguments, **named)))
        if hook == "on_train_begin" or not self._is_leader():
            return
        self.begin()
        if hook not in _BEGINS:
            call(*arguments, **named)

    def begin(self) -> None:
        begins, self._begins = self._begins, []
        for _, begin in begins:
            begin()

    @property
    def has_begun(self) -> bool:
        return all(hook != "on_train_begin" for hook, _ in self._begins)


class LeaderLog(LeaderOnly):
    """`steps_done`: of the run. Where there are some, others have begun the file."""

    def __init__(self, inner: Any, is_leader: Callable[[], bool], steps_done: Callable[[], int]) -> None:
        super().__init__(inner, is_leader)
        self._steps_done = steps_done
        self._epoch: int | None = None  # whose row, and those after it, will be written yet
        self._passed: tuple[Any, ...] | None = None  # what the end of the last epoch had, which the leader was to write

    def forward(self, hook: str, *arguments: Any, **named: Any) -> None:
        if hook == "on_epoch_begin":
            self._epoch = arguments[0]
        super().forward(hook, *arguments, **named)
        if hook == "on_epoch_end":
            self._epoch, self._passed = arguments[0] + 1, arguments

    def begin(self) -> None:
        goes_on = not self.has_begun and self._steps_done() > 0 and not self.inner.append
        rows = keep_rows(Path(self.inner.filename), self.inner.sep, self._epoch) if goes_on else None
        self.inner.append = self.inner.append or goes_on
        super().begin()
        if rows is not None and self._passed is not None and self._passed[0] not in rows:
            self.inner.on_epoch_end(*self._passed)


def keep_rows(path: Path, separator: str, before: int | None) -> set[int]:
    """Leave only whole rows of epochs before this one in the file; None: of all. The epochs that are there."""
    if not path.is_file():
        return set()
    with path.open(newline="") as file:
        rows = list(csv.reader(file, delimiter=separator))
    head, kept = rows[:1], dict[int, list[str]]()
    for row in rows[1:]:
        if len(row) == len(head[0]) and row[0].isdecimal() and (before is None or int(row[0]) < before):
            kept[int(row[0])] = row
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    with beside.open("w", newline="") as file:
        csv.writer(file, delimiter=separator).writerows([*head, *kept.values()])
    beside.replace(path)
    return set(kept)


class LeaderSaves(_Wrapped):
    """A ModelCheckpoint that all workers call, so that all know the best value so far. The leader saves and prints."""

    def set_model(self, model: Any) -> None:
        super().set_model(model)
        self._unsaved = _Unsaved(model)

    def forward(self, hook: str, *arguments: Any, **named: Any) -> None:
        inner, verbose = self.inner, self.inner.verbose
        if not self._is_leader():
            inner.verbose = 0
            inner.set_model(self._unsaved)
        try:
            getattr(inner, hook)(*arguments, **named)
        finally:
            inner.verbose = verbose
            inner.set_model(self.model)

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self.inner, name) for name in _DECIDING if hasattr(self.inner, name)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self.inner).update(state)


class _Unsaved:
    """The model, which another worker saves."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def save(self, *arguments: Any, **named: Any) -> None: ...

    def save_weights(self, *arguments: Any, **named: Any) -> None: ...


def led(callback: Any, is_leader: Callable[[], bool], steps_done: Callable[[], int]) -> Any:
    """One of Keras' callbacks that write, as the run has it."""
    if isinstance(callback, keras.callbacks.CSVLogger):
        return LeaderLog(callback, is_leader, steps_done)
    own = ("on_train_batch_end", "on_epoch_begin", "on_epoch_end", "_save_model")
    checkpoint = keras.callbacks.ModelCheckpoint
    if isinstance(callback, checkpoint) and all(
        getattr(type(callback), one) is getattr(checkpoint, one) for one in own
    ):
        return LeaderSaves(callback, is_leader)
    return LeaderOnly(callback, is_leader)
