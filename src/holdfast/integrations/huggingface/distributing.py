"""distribute(trainer): a transformers.Trainer whose own loop takes the run's steps.

The trainer asks for the batches of an update      the step before is settled, the next begins; joiners enter here
training_step                                      once for each shard of this worker, and for those of lost peers
clipping, optimizer, scheduler, callbacks          once a step, with the mean over all shards, on every worker
evaluation                                         on every worker, with the same bits; the leader writes files

An update takes gradient_accumulation_steps batches, cut into shards. The trainer's class becomes one that has
ShardedTraining before the class that it had, so that what a person overrides in a Trainer of their own stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import transformers
from transformers.trainer_utils import EvalLoopOutput

from holdfast.core.errors import ConfigError
from holdfast.core.kinds import a_kind
from holdfast.engine.api import joining
from holdfast.engine.api.run import Run
from holdfast.engine.api.step import Step
from holdfast.engine.recovery.guarding import is_scaler
from holdfast.integrations.huggingface.trainer_state import STATE, TrainingState, check_arguments
from holdfast.integrations.loaders.driving import Driver, is_first_worker
from holdfast.integrations.loaders.evaluating import Batches, can_be_shared_out, only
from holdfast.integrations.loaders.updates import TrainingData, training_data

UNIT = 1024.0  # tokens that a shard's loss is divided by, until it is known how many the whole update has
LOSS, SUM, ITEMS, INPUTS = "loss", "loss_sum", "loss_items", "inputs"
SCALER = "holdfast.scaler"


class StepInputs(dict[str, Any]):
    """Stands for the batch of an update, whose shards are computed wherever they fall."""


class StepLoader:
    """Stands for the training's DataLoader: as many tokens an epoch as it has updates. No data."""

    def __init__(self, data: TrainingData, batch_size: int) -> None:
        self.dataset = data.dataset
        self.batch_size = batch_size
        self._steps = data.steps_per_epoch

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Any:
        return iter([StepInputs() for _ in range(self._steps)])


class PlaceInEpoch(transformers.TrainerCallback):  # type: ignore[misc, unused-ignore]
    """The loop counts an epoch's updates in a variable of its own, which a worker that joins begins at nothing."""

    def __init__(self, steps_per_epoch: int) -> None:
        self._steps_per_epoch = steps_per_epoch

    def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
        epoch, place = divmod(state.global_step - 1, self._steps_per_epoch)
        state.epoch = epoch + (place + 1) / self._steps_per_epoch


class Fitting:
    """What ShardedTraining keeps beside the trainer's own."""

    def __init__(self, *, shards: int | None, seed: int | None, threads: int, options: Mapping[str, Any]) -> None:
        self.shards = shards
        self.seed = seed
        self.threads = threads
        self.options = dict(options)
        self.data: TrainingData | None = None
        self.driver: Driver | None = None
        self.accumulation = 1
        self.passed = 0  # updates of the epoch at hand that are in the state already
        self.entered = False  # the trainer's loop has come to the run's place

    @property
    def leads(self) -> bool:
        return self.driver.leads if self.driver is not None else is_first_worker()


class ShardedTraining:
    """Before a Trainer's class. `_holdfast` is its Fitting."""

    _holdfast: Fitting

    # ---- data, and how much of it there is

    def get_train_dataloader(self: Any) -> Any:
        fitting, args = self._holdfast, self.args
        if fitting.data is not None:
            raise ConfigError(
                "train was called twice on a distributed trainer",
                hint="train once, with more epochs and callbacks that change what is to change between them",
            )
        check_arguments(self)
        loader = super().get_train_dataloader()  # type: ignore[misc]
        fitting.accumulation = int(args.gradient_accumulation_steps)
        # Of an iterable dataset the trainer knows no epochs: all its steps are one.
        named = {"shards": fitting.shards, "iterable_steps": max(0, int(args.max_steps))}
        fitting.data = training_data(loader, accumulation=fitting.accumulation, **named)
        # The loop counts updates from here on: what is accumulated in one is not its affair.
        args.gradient_accumulation_steps = 1
        self.callback_handler.callbacks.insert(0, PlaceInEpoch(fitting.data.steps_per_epoch))
        return StepLoader(fitting.data, args.per_device_train_batch_size * fitting.accumulation)

    def get_total_train_batch_size(self: Any, args: Any) -> int:
        return int(super().get_total_train_batch_size(args) * self._holdfast.accumulation)  # type: ignore[misc]

    # ---- the run

    def _prepare_for_training(self: Any, max_steps: int, train_dataloader: Any, resume_from_checkpoint: Any) -> Any:
        found = super()._prepare_for_training(max_steps, train_dataloader, resume_from_checkpoint)  # type: ignore[misc]
        fitting = self._holdfast
        data = fitting.data
        assert data is not None
        self._tr_loss, self._total_loss_scalar, self._globalstep_last_logged = torch.tensor(0.0), 0.0, 0
        self._initial_global_step = done = self.state.global_step
        extras: dict[str, Any] = {**fitting.options.pop("extras", {}), STATE: TrainingState(self)}
        if is_scaler(scaler := getattr(self.accelerator, "scaler", None)):
            extras[SCALER] = scaler
        run = joining.join(
            self.model,
            getattr(self.optimizer, "optimizer", self.optimizer),
            data.dataset,
            shards=data.shards,
            seed=self.args.seed if fitting.seed is None else fitting.seed,
            threads=fitting.threads,
            extras=extras,
            **data.after(done),
            **fitting.options,
        )
        fitting.driver = Driver(run, goal=max(0, max_steps - done))
        self._follow()
        return found

    def _run_epoch(self: Any, *args: Any, **named: Any) -> None:
        """The epochs that the run's state has behind it are passed."""
        fitting = self._holdfast
        data = fitting.data
        assert data is not None and not args
        if not fitting.entered:
            epoch, passed = divmod(self.state.global_step, data.steps_per_epoch)
            if self.state.global_step >= self.state.max_steps:
                self.control.should_training_stop = True
                return
            if named["epoch"] < epoch:
                return
            fitting.entered, fitting.passed = True, passed
        super()._run_epoch(**{**named, "resume_from_checkpoint": None})  # type: ignore[misc]

    def get_batch_samples(self: Any, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[list[Any], Any]:
        fitting = self._holdfast
        inputs = next(epoch_iterator)
        if not isinstance(inputs, StepInputs):
            raise ConfigError("the trainer's loop takes its batches from elsewhere", hint="leave its loop as it is")
        if fitting.passed:
            fitting.passed -= 1
            return [], None
        assert fitting.driver is not None
        if fitting.driver.next() is None:
            self.control.should_training_stop = True
            return [], None
        self._follow()
        return [inputs], None

    def training_step(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        if not isinstance(inputs, StepInputs):
            return super().training_step(model, inputs, num_items_in_batch)  # type: ignore[misc]
        driver = self._holdfast.driver
        compute = super().training_step  # type: ignore[misc]

        def shard(batch: Any) -> None:
            step: Step = driver.step
            items = self._get_num_items_in_batch([batch], self.args.device)
            size = batch[self._main_input].numel() if self._main_input in batch else 0
            if items is None:
                loss = compute(model, batch)
                step.record(**{LOSS: loss, INPUTS: size})
                return
            # The engine weighs a shard by its samples; here tokens count, whichever shard they are in.
            opened = driver.run.engine.open
            weight = driver.run.plan.weight(*opened.place)
            loss = compute(model, batch, torch.tensor(UNIT * weight, device=self.args.device)) * weight
            count = int(items)
            step.record(**{LOSS: loss * UNIT / max(count, 1), SUM: loss, ITEMS: count, INPUTS: size})

        step = driver.compute(shard)
        inputs[self._main_input] = torch.empty(1).expand(int(step.metrics[INPUTS] * driver.run.plan.shards + 0.5))
        return self._mean(step)

    def _mean(self: Any, step: Step) -> torch.Tensor:
        """The loss of an update. Where it is one over tokens, gradients become those of the mean over all of them."""
        if ITEMS not in step.metrics:
            return torch.tensor(step.metrics[LOSS], device=self.args.device)
        scale = UNIT / max(step.metrics[ITEMS], 1e-9)
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(scale)
        return torch.tensor(step.metrics[SUM] * scale, device=self.args.device)

    def evaluation_loop(self: Any, dataloader: Any, *args: Any, **named: Any) -> Any:
        """A loss alone is shared out while the trainer trains; predictions are made by every worker itself."""
        driver = self._holdfast.driver
        loss_only = args[1] if len(args) > 1 else named.get("prediction_loss_only")
        if driver is None or driver.step is None or not loss_only or not can_be_shared_out(dataloader):
            return super().evaluation_loop(dataloader, *args, **named)  # type: ignore[misc]
        prefix = named.get("metric_key_prefix", args[3] if len(args) > 3 else "eval")
        batches = Batches(dataloader)
        self.model.eval()

        def measure(numbered: tuple[int, Any]) -> dict[str, tuple[float, float]]:
            number, batch = numbered
            loss, _, _ = self.prediction_step(self.model, batch, True)
            size = float(batches.size_of(number))
            return {LOSS: (float(loss) * size, size)}

        found = driver.run.evaluate(batches, measure, batch_size=1, collate_fn=only)
        metrics = {f"{prefix}_{name}": value for name, value in found.items()}
        return EvalLoopOutput(None, None, metrics, len(dataloader.dataset))

    @property
    def _main_input(self: Any) -> str:
        return str(getattr(self.model, "main_input_name", "input_ids"))

    # ---- files and prints

    def _follow(self: Any) -> None:
        """Who leads may have changed with the view."""
        self.state.is_world_process_zero = self.state.is_local_process_zero = self._holdfast.leads

    def is_world_process_zero(self: Any) -> bool:
        return bool(self._holdfast.leads)

    def is_local_process_zero(self: Any) -> bool:
        return bool(self._holdfast.leads)

    def save_model(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self._holdfast.leads:
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]

    def _save_checkpoint(self: Any, model: Any, trial: Any) -> None:
        if self._holdfast.leads:
            super()._save_checkpoint(model, trial)  # type: ignore[misc]
        else:
            self.store_flos()
        driver = self._holdfast.driver
        if driver is not None:  # what the file system says of the best one, the same everywhere
            self.state.best_model_checkpoint = driver.agree(self.state.best_model_checkpoint)

    # ---- the end

    def _finalize_training(self: Any, trial: Any, num_train_samples: Any, start_time: float) -> Any:
        fitting = self._holdfast
        assert fitting.driver is not None
        fitting.driver.finish()
        self.args.gradient_accumulation_steps = fitting.accumulation
        return super()._finalize_training(trial, num_train_samples, start_time)  # type: ignore[misc]


def distribute(
    trainer: Any, *, shards: int | None = None, seed: int | None = None, threads: int = 1, **options: Any
) -> Any:
    """The trainer itself; its train() trains with all workers of the run that this process was started for.

    A step takes gradient_accumulation_steps batches in `shards` shards: as many as batches are accumulated, or else up
    to eight. With the same seed (args.seed if nothing is said), batch size and shards the weights are the same bits for
    any number of workers, whatever fails. The other options are those of holdfast.join that say nothing of data:
    checkpoint, non_finite, spike, extras.
    """
    if not isinstance(trainer, transformers.Trainer):
        raise ConfigError(f"the trainer is {a_kind(trainer)}", hint="distribute(transformers.Trainer(...))")
    if isinstance(trainer, ShardedTraining):
        raise ConfigError("the trainer is distributed already", hint="call distribute once, before trainer.train()")
    kind = type(trainer)
    trainer._holdfast = Fitting(shards=shards, seed=seed, threads=threads, options=options)
    trainer.__class__ = type(kind.__name__, (ShardedTraining, kind), {"__doc__": kind.__doc__})
    return trainer


def run_of(trainer: Any) -> Run:
    """The run that the trainer has joined: for its digest, and what else holdfast.Run has."""
    fitting = getattr(trainer, "_holdfast", None)
    if not isinstance(fitting, Fitting) or fitting.driver is None:
        raise ConfigError("the trainer has joined no run yet", hint="distribute(trainer), then trainer.train()")
    return fitting.driver.run
