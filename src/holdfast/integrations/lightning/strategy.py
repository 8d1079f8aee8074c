"""HoldfastStrategy: Lightning's own fit loop, in which an iteration is a step of the run.

    Trainer asks for a batch        the step before is settled, the next begins; a worker that joins enters here
    training_step, backward         once for each shard of this worker, and for those of lost peers
    clipping, optimizer, scheduler  once a step, with the mean over all shards, on every worker
    callbacks, evaluation           on every worker with the same numbers; files and prints are the leader's

An iteration takes `accumulate_grad_batches` batches of the DataLoader, cut into shards. Owns the run, from the moment
before the fit loop begins until the strategy is torn down. Belongs to the thread that calls Trainer.fit.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn

from holdfast.core.errors import ConfigError
from holdfast.engine.api import joining
from holdfast.engine.api.run import Run
from holdfast.engine.recovery.guarding import is_scaler
from holdfast.integrations.lightning.by_hand import ByHand
from holdfast.integrations.lightning.checking import check_module, check_trainer
from holdfast.integrations.lightning.evaluation import WholeEvaluation, evaluate
from holdfast.integrations.lightning.shard_logging import LOSS, ShardLogging
from holdfast.integrations.lightning.step_loader import StepBatch, StepLoader
from holdfast.integrations.lightning.trainer_state import TrainerState, begin_epoch_again, counted_in_batches
from holdfast.integrations.lightning.written_files import chosen_places, write_on
from holdfast.integrations.loaders.driving import GOAL, Driver, is_first_worker
from holdfast.integrations.loaders.evaluating import can_be_shared_out
from holdfast.integrations.loaders.updates import TrainingData, training_data

STATE = "holdfast.lightning"
SCALER = "holdfast.scaler"


class HoldfastStrategy(SingleDeviceStrategy):  # type: ignore[misc, unused-ignore]
    """For Trainer(strategy=HoldfastStrategy(shards=8)).

    Of a module that optimizes by hand, training_step calls optimizers at most `updates` times: as many as there are,
    where nothing is said. A step takes accumulate_grad_batches batches in `shards` shards: as many as batches are
    accumulated, or else up to eight. With the same seed, batch size and shards the weights are the same bits for any
    number of workers, whatever fails. The other options are those of holdfast.join that say nothing of data:
    checkpoint, non_finite, spike, extras.
    """

    strategy_name = "holdfast"

    def __init__(
        self,
        *,
        shards: int | None = None,
        updates: int | None = None,
        spread_evaluation: bool = False,
        seed: int | None = None,
        threads: int = 1,
        device: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(device="cpu" if device is None else device)
        # To Lightning each worker is alone, whoever has started it. What it finds out by itself takes a task of Slurm
        # for a rank of its own: it refuses --ntasks, and on the job's notice requeues the job, once for each worker.
        self.cluster_environment = LightningEnvironment()
        self._shards = shards
        self._updates = updates
        self._spread = spread_evaluation
        self._by_hand: ByHand | None = None
        self._seed = int(os.environ.get("PL_GLOBAL_SEED", "0")) if seed is None else seed
        self._threads = threads
        self._device = device
        self._options = options
        self._data: TrainingData | None = None
        self._logging: ShardLogging | None = None
        self._batch: Any = None  # of the shard at hand
        self._failed = False
        self._led = False
        self._accumulation = 0  # batches in an update; 0: not known yet
        self.driver: Driver | None = None
        rank_zero_only.rank = 0 if is_first_worker() else 1

    # ---- what Lightning asks of a strategy

    @property
    def is_global_zero(self) -> bool:
        return self.driver.leads if self.driver is not None else is_first_worker()

    @property
    def root_device(self) -> torch.device:
        if self._device is None and self.accelerator is not None and not isinstance(self.accelerator, CPUAccelerator):
            return torch.device(self.accelerator.get_parallel_devices([0])[0])
        root: torch.device = self._root_device
        return root

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self.driver is None:
            return obj
        return self.driver.agree(os.fspath(obj) if isinstance(obj, os.PathLike) else obj)

    def process_dataloader(self, dataloader: object) -> object:
        """The training's becomes the run's steps. Others stay: every worker evaluates by itself, with the same bits."""
        trainer = self._trainer
        if trainer.state.fn != TrainerFn.FITTING:
            return dataloader
        if not trainer.training:
            return self._evaluation(dataloader) if self._spread else dataloader
        accumulation = check_trainer(trainer, already=self._data is not None)
        self._data = training_data(
            dataloader,
            accumulation=accumulation,
            shards=self._shards,
            batches_max=_batches_max(dataloader, trainer.limit_train_batches),
            times=self._times,
        )
        # From here on the trainer counts updates: what is accumulated in one is this strategy's affair.
        trainer.accumulate_grad_batches, trainer.limit_train_batches = 1, 1.0
        self._accumulation = accumulation
        if isinstance(trainer.val_check_interval, int):
            trainer.val_check_interval = max(1, trainer.val_check_interval // accumulation)
        return StepLoader(self._data.steps_per_epoch // self._times, self._next_batch)

    def _evaluation(self, loader: Any) -> object:
        trainer = self._trainer
        if not can_be_shared_out(loader):
            raise ConfigError(
                "spread_evaluation takes one DataLoader in the order of its dataset, which has numbers",
                hint="DataLoader(dataset, batch_size=...) without shuffle, or leave out spread_evaluation",
            )
        whole = WholeEvaluation(loader, batches_max=_batches_max(loader, trainer.limit_val_batches))
        trainer.limit_val_batches = 1.0
        return [whole]

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(args[0], WholeEvaluation):
            return super().validation_step(*args, **kwargs)
        compute, driver = super().validation_step, self.driver
        assert driver is not None

        def measure(batch: Any, number: int) -> None:
            compute(self._moved(batch), *([number] if len(args) > 1 else []))

        return evaluate(driver, self._trainer, args[0], measure)

    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Nobody waits here. Lightning says with one that everything is set up: the run is joined then."""
        if name == "run-stage" and self._trainer.state.fn == TrainerFn.FITTING:
            self._join()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(args[0], StepBatch):
            return super().training_step(*args, **kwargs)
        compute = super().training_step
        if self._by_hand is None:
            return compute(self._batch, *args[1:], **kwargs)

        def shard(batch: Any) -> Any:
            return compute(self._moved(batch), *args[1:], **kwargs)

        return self._by_hand.train(shard)

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if isinstance(batch, (StepBatch, WholeEvaluation)):
            return batch
        return super().batch_to_device(batch, device, dataloader_idx)

    def optimizer_step(
        self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """The closure computes a shard: it is called for each, and the optimizer then has the mean."""
        if self._by_hand is not None:
            if self._by_hand.in_shard:
                return self._by_hand.step_asked(optimizer, closure, kwargs)
            return super().optimizer_step(optimizer, closure, model, **kwargs)

        def all_shards() -> Any:
            return self._compute(closure)

        with _closure_first(optimizer):
            return super().optimizer_step(optimizer, all_shards, model, **kwargs)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """As Lightning writes it without Holdfast, where it counts every batch."""
        if self.is_global_zero:
            checkpoint = counted_in_batches(checkpoint, times=self._accumulation or 1)
            super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        accumulation = self._accumulation or int(self._trainer.accumulate_grad_batches)
        return counted_in_batches(checkpoint, over=accumulation)

    def on_exception(self, exception: BaseException) -> None:
        self._failed = True
        super().on_exception(exception)

    def teardown(self) -> None:
        if self.driver is not None and not self._failed and self._trainer.state.fn == TrainerFn.FITTING:
            self.driver.finish()
        super().teardown()

    # ---- the run

    @property
    def _trainer(self) -> Trainer:
        module = self.lightning_module
        assert module is not None
        return module.trainer

    def _join(self) -> None:
        if self.driver is not None:
            raise ConfigError(
                "fit was called twice on one HoldfastStrategy",
                hint="train in one fit, with more epochs and callbacks that change what is to change between them",
            )
        trainer = self._trainer
        trainer.fit_loop.setup_data()
        data = self._data
        if data is None:
            raise ConfigError("there is no training data", hint="trainer.fit(module, train_dataloader)")
        module = self.lightning_module
        assert module is not None
        check_module(module, trainer)
        state = TrainerState(trainer)
        extras: dict[str, Any] = {**self._options.pop("extras", {}), STATE: state}
        scaler = getattr(self.precision_plugin, "scaler", None)
        if is_scaler(scaler):
            extras[SCALER] = scaler
        optimizers = self.optimizers
        several = {str(number): one for number, one in enumerate(optimizers)}
        done = (trainer.fit_loop.total_batch_idx + 1) * self._times
        with _own_signals():
            run = joining.join(
                module,
                optimizers[0] if len(optimizers) == 1 else several,
                data.dataset,
                shards=data.shards,
                seed=self._seed,
                threads=self._threads,
                extras=extras,
                **data.after(done),
                **self._options,
            )
        self.driver = Driver(run, goal=self._goal(done))
        self.driver.on_asked, self.driver.on_begun = state.step_asked, state.step_begun
        self._logging = ShardLogging(trainer, data.shards)
        if not module.automatic_optimization:
            self._by_hand = ByHand(trainer, self.driver, self._logging, updates=self._times, apply=self._apply_by_hand)
        if self.driver.arrived_at:
            trainer.num_sanity_val_steps = 0  # the others have done that
            begin_epoch_again(trainer)
        state.take_places(state.places or self.driver.agree(chosen_places(trainer)))
        self._follow()

    def _next_batch(self) -> StepBatch:
        """The trainer asks for its next batch."""
        driver, trainer = self.driver, self._trainer
        assert driver is not None
        step = driver.next()
        if step is None:
            trainer.should_stop = True
            raise StopIteration
        self._follow()
        fetcher = trainer.fit_loop._data_fetcher
        assert fetcher is not None
        progress = trainer.fit_loop.epoch_loop.batch_progress
        if step.number % self._times:  # a worker has come in the middle of a batch, which the loop counts once more
            for counts in (progress.current, progress.total):
                counts.ready -= 1
                counts.started -= 1
        fetcher.fetched = progress.current.ready
        return StepBatch(step.number)

    def _goal(self, done: int) -> int:
        """How many steps the trainer will take, after those of a checkpoint of Lightning's own."""
        trainer = self._trainer
        if trainer.max_epochs in (None, -1) or (self._times > 1 and trainer.max_steps != -1):
            return GOAL
        return max(0, int(trainer.estimated_stepping_batches) * self._times - done)

    @property
    def _times(self) -> int:
        """How many steps of the run are made with the same samples."""
        module = self.lightning_module
        assert module is not None
        if module.automatic_optimization:
            return 1
        if self._updates is None and not self.optimizers:
            raise ConfigError(
                "the training data is asked for before the optimizers are there",
                hint="say how often training_step calls optimizers: HoldfastStrategy(updates=...)",
            )
        return self._updates or len(self.optimizers)

    def _apply_by_hand(self, optimizer: torch.optim.Optimizer, kwargs: dict[str, Any]) -> Any:
        with _closure_first(optimizer):
            return super().optimizer_step(optimizer, lambda: None, None, **kwargs)

    def _follow(self) -> None:
        """Who leads may have changed with the view."""
        assert self.driver is not None
        rank_zero_only.rank = 0 if self.driver.leads else 1
        if self.driver.leads and not self._led:
            write_on(self._trainer)
        self._led = self.driver.leads

    def _compute(self, closure: Any) -> torch.Tensor:
        driver, logging, trainer = self.driver, self._logging, self._trainer
        assert driver is not None and logging is not None

        def shard(batch: Any) -> None:
            assert driver is not None and driver.step is not None and logging is not None
            self._batch = batch = self._moved(batch)
            with logging.shard(driver.step, batch):
                loss = closure()
            if loss is None:
                raise ConfigError(
                    "training_step returned no loss for a shard, which only this worker would leave out",
                    hint="return a loss of zero that depends on the parameters, such as 0.0 * logits.sum()",
                )
            driver.step.record(**{LOSS: loss})

        zeroed = trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.zero_grad
        before = zeroed.state_dict()
        step = driver.compute(shard)
        self._batch = None
        zeroed.load_state_dict(before)  # it was called for each shard of this worker, and counts once
        zeroed.increment_ready()
        zeroed.increment_started()
        zeroed.increment_completed()
        results = trainer.fit_loop.epoch_loop._results
        results.batch_size = step.samples
        logging.log_means(step)
        mean = torch.tensor(step.metrics[LOSS], device=self.root_device)
        closure._result = trainer.fit_loop.epoch_loop.automatic_optimization.output_result_cls(mean)
        return mean

    def _moved(self, batch: Any) -> Any:
        """As the trainer does it with a batch of its own."""
        module = self.lightning_module
        assert module is not None
        batch = self.precision_plugin.convert_input(batch)
        batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
        return super().batch_to_device(batch, dataloader_idx=0)


def run_of(trainer: Trainer) -> Run:
    """The run that the trainer's fit has joined: for its digest, and what else holdfast.Run has."""
    strategy = trainer.strategy
    if not isinstance(strategy, HoldfastStrategy) or strategy.driver is None:
        raise ConfigError(
            "the trainer has joined no run yet", hint="Trainer(strategy=HoldfastStrategy()), then trainer.fit(module)"
        )
    return strategy.driver.run


def _batches_max(loader: Any, limit: float) -> int | None:
    """A limit as the trainer's arguments have it: a number of batches, or a part of them."""
    if isinstance(limit, int):
        return limit
    return None if limit == 1.0 else int(len(loader) * limit)


@contextmanager
def _closure_first(optimizer: Any) -> Iterator[None]:
    """Lightning's plugins hand the closure to the optimizer, which may call it once more with other weights."""
    before: Mapping[str, Any] = dict(vars(optimizer))
    step = optimizer.step

    def closure_first(closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        result = closure() if closure is not None else None
        step(**kwargs)
        return result

    optimizer.step = closure_first
    try:
        yield
    finally:
        if "step" in before:
            optimizer.step = before["step"]
        else:
            del optimizer.step


@contextmanager
def _own_signals() -> Iterator[None]:
    """Lightning's handler of SIGTERM ends the trainer in an exception; the run's finishes the step and saves it."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield


__all__ = ["HoldfastStrategy", "LightningModule", "run_of"]
