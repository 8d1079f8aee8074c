"""Accelerator: accelerate's, for a loop of one's own, whose prepared training loader gives the run's shards.

    for batch in loader                 the shards of a step that fall to this worker, step after step
    accelerator.backward(loss)          the shard is handed in; after the last one, the mean over all shards is there
    clip, optimizer, scheduler          act where accelerator.sync_gradients is true: once a step, on every worker

A step takes gradient_accumulation_steps batches of the loader. A worker to which no shard falls, as one that has just
joined, goes through the loop's lines once all the same, with a shard that somebody else hands in: what it computes is
thrown away, and the lines after backward have the mean. Belongs to the thread of the loop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import accelerate
import torch
from torch.utils.data import DataLoader

from holdfast.core.errors import ConfigError
from holdfast.data.seeding import derive_seed, seed_everything
from holdfast.engine.api import joining
from holdfast.engine.api.run import Run
from holdfast.engine.api.step import Step
from holdfast.engine.recovery.guarding import is_scaler
from holdfast.engine.steps import Shard
from holdfast.integrations.loaders.driving import is_first_worker
from holdfast.integrations.loaders.updates import training_data

LOSS = "loss"


class Accelerator(accelerate.Accelerator):  # type: ignore[misc, unused-ignore]
    """For accelerate.Accelerator. The first DataLoader that is prepared is the training's.

    A step takes gradient_accumulation_steps batches in `shards` shards: as many as batches are accumulated, or else up
    to eight. `holdfast` are other options of holdfast.join that say nothing of data: checkpoint, non_finite, spike.
    """

    def __init__(
        self,
        *args: Any,
        shards: int | None = None,
        seed: int = 0,
        threads: int = 1,
        holdfast: Mapping[str, Any] | None = None,
        **named: Any,
    ) -> None:
        self._run: Run | None = None
        super().__init__(*args, **named)
        self.gradient_state.plugin_kwargs = {**self.gradient_state.plugin_kwargs, "adjust_scheduler": False}
        if self.num_processes != 1:
            raise ConfigError(
                f"accelerate has {self.num_processes} processes of its own",
                hint="start the script with `holdfast run --workers N`, not with accelerate launch",
            )
        self._shards = shards
        self._settings = {"seed": seed, "threads": threads, **(holdfast or {})}
        self._given: list[Any] = []  # what was prepared, as the script has made it
        self._training: ShardLoader | None = None

    @property
    def run(self) -> Run:
        """The run that the loop has joined."""
        if self._run is None:
            raise ConfigError("the loop has joined no run yet", hint="go through the prepared training loader first")
        return self._run

    # ---- what is trained

    def prepare(self, *args: Any, **named: Any) -> Any:
        found = super().prepare(*args, **named)
        several = found if isinstance(found, tuple) else (found,)
        ready = [self._prepared(given, one) for given, one in zip(args, several, strict=True)]
        return tuple(ready) if isinstance(found, tuple) else ready[0]

    def _prepared(self, given: Any, ready: Any) -> Any:
        if isinstance(given, DataLoader) and self._training is None:
            self._training = ready = ShardLoader(self, given)
        elif not isinstance(given, DataLoader):
            self._given.append(ready)
        return ready

    def join(self, loader: DataLoader[Any]) -> Run:
        """With all that was prepared until the loop begins."""
        if self._run is not None:
            return self._run
        models = [one for one in self._given if isinstance(one, torch.nn.Module)]
        optimizers = [one.optimizer for one in self._optimizers]
        if not models or not optimizers:
            raise ConfigError(
                "the training loop begins, and no model or no optimizer was prepared",
                hint="model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
            )
        things = [*self._schedulers, *self._custom_objects]
        extras: dict[str, Any] = {f"holdfast.prepared.{number}": one for number, one in enumerate(things)}
        if is_scaler(self.scaler):
            extras["holdfast.scaler"] = self.scaler
        accumulation = int(self.gradient_accumulation_steps)
        data = training_data(loader, accumulation=accumulation, shards=self._shards, iterable_steps=1)
        self._run = joining.join(
            models[0] if len(models) == 1 else {str(number): one for number, one in enumerate(models)},
            optimizers[0] if len(optimizers) == 1 else {str(number): one for number, one in enumerate(optimizers)},
            data.dataset,
            shards=data.shards,
            extras={**extras, **self._settings.pop("extras", {})},
            **data.options,
            **self._settings,
        )
        return self._run

    # ---- a step

    def backward(self, loss: Any, **named: Any) -> None:
        flow = self._training.flow if self._training is not None else None
        if flow is None:
            super().backward(loss, **named)
            return
        flow.check_open()
        (loss if self.scaler is None else self.scaler.scale(loss)).backward(**named)
        flow.computed(loss)
        self.gradient_state._set_sync_gradients(flow.is_complete)

    @contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """A step accumulates its shards, whoever computes them: nothing is left to do."""
        yield

    @property
    def step_metrics(self) -> Mapping[str, float]:
        """Of the step that was reduced last: its loss, the mean over all shards, the same on every worker."""
        flow = self._training.flow if self._training is not None else None
        return flow.step.metrics if flow is not None and flow.is_complete else {}

    # ---- once, not on every worker

    @property
    def is_main_process(self) -> bool:
        return self._run.leader if self._run is not None else is_first_worker()

    @property
    def is_local_main_process(self) -> bool:
        return self.is_main_process

    @property
    def is_last_process(self) -> bool:
        return self.is_main_process

    def print(self, *args: Any, **named: Any) -> None:
        if self.is_main_process:
            print(*args, **named)

    def save(self, *args: Any, **named: Any) -> None:
        if self.is_main_process:
            super().save(*args, **named)

    def save_model(self, *args: Any, **named: Any) -> None:
        if self.is_main_process:
            super().save_model(*args, **named)

    def save_state(self, *args: Any, **named: Any) -> Any:
        return super().save_state(*args, **named) if self.is_main_process else None

    def log(self, *args: Any, **named: Any) -> None:
        if self.is_main_process:
            super().log(*args, **named)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        if isinstance(dataloader, ShardLoader):
            raise ConfigError(
                "skip_first_batches would leave out shards that other workers count on",
                hint="holdfast run --checkpoint DIR goes on in the middle of an epoch by itself",
            )
        return super().skip_first_batches(dataloader, num_batches)


class ShardLoader:
    """The training's DataLoader: each time that it is gone through is an epoch."""

    def __init__(self, accelerator: Accelerator, loader: DataLoader[Any]) -> None:
        self.dataset = loader.dataset
        self.batch_size = loader.batch_size
        self.flow: Flow | None = None  # of the step under way
        self._accelerator = accelerator
        self._loader = loader
        self._epochs = 0

    def __len__(self) -> int:
        """As the loader has it: schedulers are made by it. How many shards fall to a worker is nobody's number."""
        return len(self._loader)

    def set_epoch(self, epoch: int) -> None:
        """The run counts its epochs itself."""

    def __iter__(self) -> Iterator[Any]:
        run = self._accelerator.join(self._loader)
        self._epochs += 1
        try:
            for step in run.epochs(self._epochs):
                self.flow = Flow(run, step)
                for batch in self.flow:
                    yield self._moved(batch)
                if self._accelerator.scaler is None:  # which leaves out an update now and then
                    self.flow.check_updated()
        finally:
            self.flow = None
            self._accelerator.gradient_state._set_sync_gradients(True)

    def _moved(self, batch: Any) -> Any:
        device = self._accelerator.device
        return batch if device.type == "cpu" else accelerate.utils.send_to_device(batch, device)


class Flow:
    """A step, whose shards go through the loop's lines one by one."""

    def __init__(self, run: Run, step: Step) -> None:
        self.step = step
        self.is_complete = False
        self._run = run
        self._engine = run.engine
        self._shard: Shard | None = None  # that the lines have now
        self._next: Shard | None = None
        self._only_looks = False  # the lines have a shard that another worker hands in
        self._waits = False  # for the backward pass of what the lines have

    def __iter__(self) -> Iterator[Any]:
        engine, seed = self._engine, self._run.plan.seed
        self._next = engine.open_shard()
        while not self.is_complete:
            self._shard, self._next, self._waits = self._next, None, True
            self._only_looks = self._shard is None
            if self._shard is None:
                batch, place = engine.look_at(0)
            else:
                batch, place = self._shard.batch, self._shard.place
            seed_everything(derive_seed(seed, *place))  # the lines after the last backward may have drawn
            try:
                yield batch
            except BaseException:  # the loop was left
                engine.put_down()
                raise
            if self._waits:
                raise ConfigError(
                    f"a batch of step {self.step.number} went by without accelerator.backward(loss)",
                    hint="call it for every batch; where one is to count for nothing, with a loss times 0.0",
                )

    def check_open(self) -> None:
        if not self._waits:
            raise ConfigError(
                f"accelerator.backward was called twice for a batch of step {self.step.number}",
                hint="add the losses up, and call it once: accelerator.backward(loss_1 + loss_2)",
            )

    def computed(self, loss: torch.Tensor) -> None:
        """The backward pass is done."""
        self._waits = False
        engine = self._engine
        if self._shard is not None:
            self.step.record(**{LOSS: loss})
            engine.contribute(self._shard)
            self._shard = None
        else:
            engine.forget_look()
        self._next = engine.open_shard() if not self._only_looks else None
        while self._next is None and not self.is_complete:
            self.is_complete = engine.reduce()
            if not self.is_complete:
                self._next = engine.open_shard()

    def check_updated(self) -> None:
        state = self._engine.current
        if state is not None and not state.updated and not state.skipped:
            raise ConfigError(
                f"no optimizer was called in step {state.number}, after its last batch",
                hint="call optimizer.step() after every accelerator.backward(loss), where it acts once a step; how "
                "many batches a step accumulates is Accelerator(gradient_accumulation_steps=...)",
            )
