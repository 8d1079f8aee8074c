"""The two `for`s over variables of another framework: a client of the step engine that keeps the mirror up to date."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy

from holdfast.core.errors import ConfigError
from holdfast.engine.api.run import Run
from holdfast.engine.api.step import Step
from holdfast.engine.steps import StepEngine, StepState
from holdfast.integrations.variables.arrays import Rows, first, stacked
from holdfast.integrations.variables.mirror import Mirror


class VariableStep(Step):
    """One update. Iterate over it for this worker's shards, and give it the gradients of each."""

    def __init__(self, engine: StepEngine, state: StepState, mirror: Mirror, convert: Callable[[Any], Any]) -> None:
        super().__init__(engine, state)
        self._mirror = mirror
        self._convert = convert
        self._given = False

    def __iter__(self) -> Iterator[Any]:
        engine, mirror = self._engine, self._mirror
        self._check_first()
        while not engine.reduce():
            while (shard := engine.open_shard()) is not None:
                try:
                    mirror.begin_shard(shard.place)
                    self._given = False
                    yield self._convert(shard.batch)
                    self._check_given()
                    mirror.end_shard()
                except BaseException:  # the loop was left
                    engine.put_down()
                    raise
                engine.contribute(shard)
        mirror.reduced(self.number)

    def gradients(self, gradients: Sequence[Any]) -> None:
        """Of the shard at hand, one for each trainable variable in their order: tape.gradient(loss, variables)."""
        self._shard("gradients", "step.mean has the mean over all shards")
        if self._given:
            raise ConfigError(
                f"step.gradients was called twice for a shard of step {self.number}",
                hint="call it once in `for batch in step:`, with the gradients of the whole loss",
            )
        self._mirror.contribute(gradients)
        self._given = True

    @property
    def mean(self) -> list[Any]:
        """Of the gradients over all shards, once the loop over them has ended; None where no shard has one."""
        self._state.check_complete()
        return self._mirror.mean()

    def apply(self, gradients: Sequence[Any] | None = None) -> None:
        """One update by the optimizer that join was given, with the mean or with what was made of it."""
        self._state.check_complete()
        if self._state.skipped:
            return
        mirror = self._mirror
        mirror.framework.apply(
            mirror.variables.optimizer,
            self.mean if gradients is None else gradients,
            mirror.variables.trainable,
        )

    def _check_given(self) -> None:
        if not self._given:
            raise ConfigError(
                f"a shard of step {self.number} ended without its gradients",
                hint="end the inner loop with step.gradients(tape.gradient(loss, model.trainable_variables))",
            )


class VariableRun:
    """One worker's part in a run. What holdfast.Run has, this has, too."""

    def __init__(self, run: Run, mirror: Mirror, convert: Callable[[Any], Any]) -> None:
        self.run = run
        self._mirror = mirror
        self._convert = convert
        self._updates = self._count()
        run.engine.before_applied = self._settle

    def __getattr__(self, name: str) -> Any:
        return getattr(self.run, name)

    def steps(self, count: int) -> Iterator[VariableStep]:
        """Steps until the run has had `count` of them, whoever did the earlier ones."""
        return map(self._begun, self.run.steps(count))

    def epochs(self, count: int) -> Iterator[VariableStep]:
        """Steps until `count` epochs are over."""
        return map(self._begun, self.run.epochs(count))

    def evaluate(self, dataset: Any, fn: Callable[[Any], Mapping[str, Any]], **options: Any) -> dict[str, float]:
        """As holdfast.Run's, with arrays as a dataset and tensors of the framework in the batch."""
        rows = isinstance(dataset, (tuple, list, dict, numpy.ndarray))
        options.setdefault("collate_fn", first if rows else stacked)
        return self.run.evaluate(Rows(dataset) if rows else dataset, lambda batch: fn(self._convert(batch)), **options)

    def _begun(self, step: Step) -> VariableStep:
        state = self.run.engine.current
        assert state is not None and state.number == step.number
        self._updates = self._count()
        self._mirror.begin_step(step.number)
        return VariableStep(self.run.engine, state, self._mirror, self._convert)

    def _settle(self) -> None:
        """The lines for the step are done: what they have made of the variables is the state."""
        for _ in range(max(0, self._count() - self._updates)):
            self._mirror.optimizer.step()
        self._mirror.take_all()

    def _count(self) -> int:
        return int(self._mirror.framework.tensor(self._mirror.variables.optimizer.iterations))
