"""Modules that optimize by hand: training_step calls optimizers itself, each call of which is a step of the run.

A training_step with `updates` calls of an optimizer's step() is that many steps. In step number u of them every shard
goes through training_step from its beginning, with the weights as they are after u updates: calls before number u are
passed, at number u the gradients of that optimizer's parameters are the shard's, and what comes after is left to the
next. What training_step asks for on the way (clipping, a step of a scheduler) is written down, and done once, when the
mean is there.

All steps of a batch have the same samples and the same random numbers. What was computed before an update, and is used
after it, is computed again; where it depends on the weights that were updated, torch would refuse it without Holdfast
too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from lightning.pytorch import Trainer

from holdfast.core.errors import ConfigError
from holdfast.data.seeding import derive_seed, seed_everything
from holdfast.engine.api.step import Step
from holdfast.integrations.lightning.shard_logging import ShardLogging
from holdfast.integrations.loaders.driving import Driver

PLAN = "holdfast.by_hand"  # in what shards tell each other


class _UpdateReached(BaseException):
    """training_step has come to the update that this step is: nobody's error."""


class ByHand:
    """Of one trainer. `apply` calls an optimizer as Lightning does, once the gradients are there."""

    def __init__(
        self,
        trainer: Trainer,
        driver: Driver,
        logging: ShardLogging,
        *,
        updates: int,
        apply: Callable[[torch.optim.Optimizer, dict[str, Any]], Any],
    ) -> None:
        self._trainer = trainer
        self._driver = driver
        self._logging = logging
        self._updates = updates
        self._apply = apply
        self._parameters = list(driver.run.model.parameters())
        self.in_shard = False
        self._update = 0  # which of the batch's updates this step is
        self._calls = 0  # of optimizers' step() in this shard so far
        self._asked: list[list[Any]] = []  # what training_step wants done with this update, in its order
        self._gradients: list[torch.Tensor | None] | None = None

    def train(self, training_step: Callable[[Any], Any]) -> None:
        """A batch: all its steps, from the one that has begun."""
        driver = self._driver
        assert driver.step is not None
        for update in range(driver.step.number % self._updates, self._updates):
            if driver.step.number % self._updates != update and driver.next() is None:
                return
            self._update = update
            step = driver.compute(lambda batch: self._shard(batch, training_step))
            self._trainer.fit_loop.epoch_loop._results.batch_size = step.samples
            self._logging.log_means(step, begins_batch=update == 0)
            self._do(step)

    def step_asked(self, optimizer: torch.optim.Optimizer, closure: Callable[[], Any], kwargs: dict[str, Any]) -> Any:
        """training_step has called an optimizer."""
        number, update = self._calls, self._update
        result = closure()
        self._calls += 1
        if number < update:
            self._logging.forget()  # what was logged so far was so with the update that is made already
            return result
        if number > update:
            raise ConfigError(
                f"training_step calls optimizers more than {self._updates} times",
                hint=f"say how often it does at most: HoldfastStrategy(updates={number + 1})",
            )
        mine = {id(one) for group in optimizer.param_groups for one in group["params"]}
        self._gradients = [one.grad if id(one) in mine else None for one in self._parameters]
        self._asked.append(["step", self._trainer.optimizers.index(optimizer), kwargs])
        if update < self._updates - 1:
            raise _UpdateReached
        for one in self._parameters:  # the lines that follow may clear or use what is there
            one.grad = None if one.grad is None else one.grad.clone()
        return result

    # ---- a shard

    def _shard(self, batch: Any, training_step: Callable[[Any], Any]) -> None:
        driver = self._driver
        step, opened = driver.step, driver.run.engine.open
        assert step is not None and opened is not None
        self._calls, self._asked, self._gradients = 0, [], None
        seed_everything(derive_seed(driver.run.plan.seed, "batch", step.number // self._updates, opened.number))
        frozen = [one.requires_grad for one in self._parameters]
        with self._logging.shard(step, batch, more=lambda: {PLAN: self._asked}), self._writing_down():
            self.in_shard = True
            try:
                training_step(batch)
            except _UpdateReached:
                pass
            finally:
                self.in_shard = False
        if self._calls == 0 and any(one.grad is not None for one in self._parameters):
            raise ConfigError(
                "training_step leaves gradients for a later batch, which another worker may have",
                hint="call optimizer.step() for every batch, with a larger batch_size and HoldfastStrategy(shards=...)",
            )
        for one, flag in zip(self._parameters, frozen, strict=True):
            one.requires_grad_(flag)
        for one, gradient in zip(self._parameters, self._gradients or [None] * len(frozen), strict=True):
            one.grad = gradient

    @contextmanager
    def _writing_down(self) -> Iterator[None]:
        """Clipping and schedulers, which are for the mean."""
        trainer = self._trainer
        plugin = trainer.strategy.precision_plugin
        optimizers = trainer.optimizers

        def clip(optimizer: Any, clip_val: float = 0.0, gradient_clip_algorithm: Any = "norm") -> None:
            inner = getattr(optimizer, "optimizer", optimizer)
            how = str(getattr(gradient_clip_algorithm, "value", gradient_clip_algorithm))
            self._ask(["clip", optimizers.index(inner), float(clip_val), how])

        with ExitStack() as stack:
            stack.enter_context(_replaced(plugin, "clip_gradients", clip))
            for number, config in enumerate(trainer.lr_scheduler_configs):
                stack.enter_context(_replaced(config.scheduler, "step", self._scheduler(number)))
            for one in trainer.strategy._lightning_optimizers:  # counted when it is done
                stack.enter_context(_replaced(one, "_on_before_step", _nothing))
                stack.enter_context(_replaced(one, "_on_after_step", _nothing))
            yield

    def _scheduler(self, number: int) -> Callable[..., None]:
        def step(*args: Any) -> None:
            self._ask(["scheduler", number, [float(one) for one in args]])

        return step

    def _ask(self, what: list[Any]) -> None:
        if self._calls == self._update or self._gradients is not None:
            self._asked.append(what)

    # ---- the mean is there

    def _do(self, step: Step) -> None:
        told = [shard[PLAN] for shard in step.gathered]
        if any(one != told[0] for one in told):
            raise ConfigError(
                f"training_step uses its optimizers otherwise for one shard of step {step.number} than for others",
                hint="decide by batch_idx or by what is logged, not by a shard's own samples",
            )
        trainer = self._trainer
        progress = trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress
        for what, number, *rest in told[0]:
            if what == "clip":
                trainer.strategy.precision_plugin.clip_gradients(
                    trainer.optimizers[number], clip_val=rest[0], gradient_clip_algorithm=rest[1]
                )
            elif what == "scheduler":
                trainer.lr_scheduler_configs[number].scheduler.step(*rest[0])
            else:
                progress.increment_ready()
                self._apply(trainer.optimizers[number], rest[0])
                progress.increment_completed()


@contextmanager
def _replaced(thing: Any, name: str, value: Any) -> Iterator[None]:
    own = vars(thing)
    before = own.get(name)
    own[name] = value
    try:
        yield
    finally:
        if before is None:
            del own[name]
        else:
            own[name] = before


def _nothing() -> None:
    pass
