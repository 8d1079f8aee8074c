"""What a trainer and a module were asked for that has no meaning on shards: refused in one sentence each."""

from __future__ import annotations

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import (
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from holdfast.core.errors import ConfigError

_AVERAGE = "keep the average in a module, and pass it on: HoldfastStrategy(extras={'average': average})"
_NOT_YET = {
    StochasticWeightAveraging: _AVERAGE,
    WeightAveraging: _AVERAGE,
    GradientAccumulationScheduler: "Trainer(accumulate_grad_batches=...), the same for all epochs",
}


def check_trainer(trainer: Trainer, *, already: bool) -> int:
    """How many batches an update takes. `already`: the training data was asked for once."""
    if already:
        raise ConfigError(
            "the trainer has several training DataLoaders, or loads one anew",
            hint="give one DataLoader, without reload_dataloaders_every_n_epochs",
        )
    devices = len(getattr(trainer._accelerator_connector, "_parallel_devices", ()) or (0,))
    if devices != 1 or trainer.num_nodes != 1:
        raise ConfigError(
            f"the trainer has {devices} devices on {trainer.num_nodes} nodes",
            hint="Trainer(devices=1): `holdfast run --workers N` says how many processes train",
        )
    for callback in trainer.callbacks:
        for kind, hint in _NOT_YET.items():
            if isinstance(callback, kind):
                raise ConfigError(
                    f"the callback {type(callback).__name__} does not go with HoldfastStrategy", hint=hint
                )
    accumulation = int(trainer.accumulate_grad_batches)
    interval = trainer.val_check_interval
    if isinstance(interval, int) and interval % accumulation:
        raise ConfigError(
            f"val_check_interval={interval} is in the middle of an update of {accumulation} accumulated batches",
            hint=f"use a multiple of accumulate_grad_batches={accumulation}",
        )
    return accumulation


def check_module(module: LightningModule, trainer: Trainer) -> None:
    if is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
        raise ConfigError(
            "training_step takes a dataloader_iter, which gives batches that nobody else could fetch again",
            hint="def training_step(self, batch, batch_idx)",
        )
    if not trainer.strategy.optimizers:
        raise ConfigError("the module has no optimizer", hint="return one from configure_optimizers")
