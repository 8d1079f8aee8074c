"""What a Lightning trainer knows beside the model and its optimizers, as one extra that travels with the snapshot.

Progress of its loops, schedulers, what callbacks remember, metrics so far. It is that of one place of the loop: where
the next batch is asked for, or where the fit has come to its end. In a step the loops count further, each worker at its
own pace, and the state may be read then too: so what they had counted before is kept until the next step. Times and
paths are not in it, which differ between workers; where files are written is, once all have taken the first worker's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, Timer

from holdfast.integrations.lightning.shard_logging import collection_state, load_collection
from holdfast.integrations.lightning.written_files import use_places

_METRICS = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
_OF_THIS_WORKER = ("dirpath",)  # of what ModelCheckpoint remembers


class TrainerState:
    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.places: dict[str, list[Any]] = {}  # where it writes, once that is agreed on
        self._begun: dict[str, Any] = {}  # what the loops count in a step, as it was when the step began

    def step_asked(self) -> None:
        """The lines of the last step are done: what the loops have counted belongs to the state."""
        self._begun = {}

    def step_begun(self) -> None:
        """A joiner may be given the state until the step is over; what the loops count meanwhile is not in it."""
        self._begun = self._counted()

    def _counted(self) -> dict[str, Any]:
        trainer = self._trainer
        return {"progress": trainer.fit_loop.state_dict(), "first": trainer._logger_connector._first_loop_iter}

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        connector = trainer._logger_connector
        return {
            **(self._begun or self._counted()),
            "stop": bool(trainer.should_stop),
            "callbacks": {name: state for name, (_, state) in self._callbacks().items()},
            "schedulers": [one.scheduler.state_dict() for one in trainer.lr_scheduler_configs],
            "data": trainer.datamodule.state_dict() if trainer.datamodule is not None else {},
            "metrics": {name: _tensors(getattr(connector, name)) for name in _METRICS},
            "results": collection_state(trainer.fit_loop.epoch_loop._results),
            "places": self.places,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        trainer = self._trainer
        connector = trainer._logger_connector
        _load_progress(trainer.fit_loop, state["progress"], "")
        trainer.should_stop = state["stop"]
        callbacks = self._callbacks()
        if set(state["callbacks"]) != set(callbacks):
            raise ValueError(f"the run has the callbacks {', '.join(sorted(state['callbacks']))}")
        for name, remembered in state["callbacks"].items():
            callback, own = callbacks[name]
            callback.load_state_dict(dict(remembered) | _own_paths(callback) if own else dict(remembered))
        for one, remembered in zip(trainer.lr_scheduler_configs, state["schedulers"], strict=True):
            one.scheduler.load_state_dict(remembered)
        if trainer.datamodule is not None:
            trainer.datamodule.load_state_dict(state["data"])
        for name in _METRICS:
            setattr(connector, name, dict(state["metrics"][name]))
        connector._first_loop_iter = state["first"]
        load_collection(trainer.fit_loop.epoch_loop._results, state["results"])
        if state["places"]:
            self.take_places(state["places"])

    def take_places(self, places: Mapping[str, list[Any]]) -> None:
        """Whoever becomes the first writes on where the first worker has begun."""
        self.places = {name: list(values) for name, values in places.items()}
        use_places(self._trainer, self.places)

    def _callbacks(self) -> dict[str, tuple[Any, dict[str, Any]]]:
        found = {}
        for one in self._trainer.callbacks:
            if isinstance(one, Timer):  # it counts this worker's seconds
                continue
            state = {name: value for name, value in one.state_dict().items() if name not in _paths_of(one)}
            if state:
                found[one.state_key] = (one, state)
        return found


def begin_epoch_again(trainer: Trainer) -> None:
    """After the state has come: the loop itself counts the epoch that it is about to begin, and is in already."""
    progress = trainer.fit_loop.epoch_progress
    if progress.current.ready > progress.current.processed:
        for counts in (progress.current, progress.total):
            counts.ready -= 1
            counts.started -= 1


def counted_in_batches(checkpoint: dict[str, Any], *, times: int = 1, over: int = 1) -> dict[str, Any]:
    """A checkpoint of Lightning whose progress in an epoch counts batches, from one that counts updates, or back."""
    key = "epoch_loop.batch_progress"
    fit = checkpoint.get("loops", {}).get("fit_loop", {})
    if times == over or key not in fit:
        return checkpoint
    counts = {}
    for name, part in fit[key].items():
        if isinstance(part, dict):  # what is ready is counted anew; what is not done of that yet stays so
            ready = -(-part["ready"] * times // over)
            part = {what: max(0, ready - (part["ready"] - number)) for what, number in part.items()}
        counts[name] = part
    return {**checkpoint, "loops": {**checkpoint["loops"], "fit_loop": {**fit, key: counts}}}


def _load_progress(loop: Any, state: dict[str, Any], prefix: str) -> None:
    """As the loop's own load_state_dict, which would make it restart as after a crash."""
    loop._load_from_state_dict(dict(state), prefix)
    for name, child in vars(loop).items():
        if hasattr(child, "_load_from_state_dict") and hasattr(child, "restarting"):
            _load_progress(child, state, f"{prefix}{name}.")


def _paths_of(callback: Any) -> tuple[str, ...]:
    return _OF_THIS_WORKER if isinstance(callback, ModelCheckpoint) else ()


def _own_paths(callback: Any) -> dict[str, Any]:
    return {name: getattr(callback, name) for name in _paths_of(callback)}


def _tensors(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
        for name, value in metrics.items()
    }
