"""What a transformers.Trainer knows beside the model and its optimizer, as one extra that travels with the snapshot.

Its TrainerState and control, the loss since it was last logged, the scheduler, what callbacks remember. Times are not
in it, which differ between workers. Owns nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
import transformers
from transformers.trainer_callback import ExportableState

from holdfast.core.errors import ConfigError

STATE = "holdfast.trainer"
_OF_THIS_WORKER = ("is_local_process_zero", "is_world_process_zero", "stateful_callbacks", "trial_name", "trial_params")
_TIMES = ("_runtime", "_per_second")
_COUNTS = ("_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step", "current_flos")
_REFUSED = (
    ("deepspeed", "deepspeed=..."),
    ("fsdp", "fsdp=..."),
    ("auto_find_batch_size", "auto_find_batch_size=True"),
    ("torchdynamo", "torchdynamo=..."),
)


class TrainingState:
    def __init__(self, trainer: transformers.Trainer) -> None:
        self._trainer: Any = trainer

    def state_dict(self) -> dict[str, Any]:
        trainer = self._trainer
        told = {one.name: getattr(trainer.state, one.name) for one in fields(trainer.state)}
        told = {name: value for name, value in told.items() if name not in _OF_THIS_WORKER}
        told["log_history"] = [_without_times(one) for one in told["log_history"]]
        return {
            "state": told,
            "control": {one.name: getattr(trainer.control, one.name) for one in fields(trainer.control)},
            "loss": trainer._tr_loss.detach().clone(),
            "counts": {name: getattr(trainer, name) for name in _COUNTS},
            "scheduler": trainer.lr_scheduler.state_dict() if trainer.lr_scheduler is not None else {},
            "callbacks": [one.state()["attributes"] for one in self._callbacks()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        trainer = self._trainer
        for part in ("state", "control"):
            for name, value in state[part].items():
                setattr(getattr(trainer, part), name, value)
        trainer._tr_loss = state["loss"].clone()
        for name, value in state["counts"].items():
            setattr(trainer, name, value)
        if trainer.lr_scheduler is not None:
            trainer.lr_scheduler.load_state_dict(state["scheduler"])
        for one, attributes in zip(self._callbacks(), state["callbacks"], strict=True):
            for name, value in attributes.items():
                setattr(one, name, value)

    def _callbacks(self) -> list[Any]:
        return [one for one in self._trainer.callback_handler.callbacks if isinstance(one, ExportableState)]


def check_arguments(trainer: Any) -> None:
    """ConfigError with the first argument that has no meaning on shards."""
    args = trainer.args
    for name, said in _REFUSED:
        if getattr(args, name, None):
            raise ConfigError(f"TrainingArguments({said}) does not go with Holdfast", hint=f"leave out {name}")
    if args.world_size != 1 or args.n_gpu > 1:
        raise ConfigError(
            f"the trainer has {max(args.world_size, args.n_gpu)} devices or processes of its own",
            hint="start the script with `holdfast run --workers N`, and show each worker one device",
        )
    if getattr(args, "include_num_input_tokens_seen", "no") == "non_padding":
        raise ConfigError(
            "include_num_input_tokens_seen='non_padding' counts what one worker has at hand",
            hint="include_num_input_tokens_seen='all'",
        )


def _without_times(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _plain(value) for name, value in entry.items() if not name.endswith(_TIMES)}


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
