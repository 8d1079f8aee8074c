"""The run's steps for whoever owns the loop: taken one by one, whenever the loop asks for its next batch.

What the loop does from one asking to the next belongs to the step between them: callbacks, evaluation, schedulers. So
the state of a step is complete when the next one is asked for, and it is there that a worker which joins enters the
loop. Belongs to the thread of the trainer's loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from holdfast.core.errors import ConfigError
from holdfast.engine.api.run import Run
from holdfast.engine.api.step import Step
from holdfast.placement.environment import WorkerEnvironment

GOAL = 1 << 40  # steps, where a loop ends by its own account


def is_first_worker() -> bool:
    """Before there is a run to ask: whether this process is the first of its host, or by itself."""
    environment = WorkerEnvironment.from_variables()
    return environment is None or environment.worker.startswith("w0.")


class Driver:
    """Of one run. `goal`: at most so many steps."""

    def __init__(self, run: Run, *, goal: int = GOAL) -> None:
        self.run = run
        self.step: Step | None = None  # that is under way
        self.is_finished = False
        self.on_asked: Callable[[], None] = lambda: None  # for a next step, which what the loop knows belongs to
        self.on_begun: Callable[[], None] = lambda: None  # what the loop counts from here on is the step's own
        self._goal = goal
        self._steps: Iterator[Step] | None = None
        run.arrive()
        self.arrived_at = run.step

    @property
    def leads(self) -> bool:
        return self.run.leader

    def next(self) -> Step | None:
        """The loop's lines for the last step are done; the next one begins. None: all have agreed to end here."""
        if self._steps is None:
            self._steps = self.run.steps(self._goal)
        self.on_asked()
        self.step = None if self.is_finished else next(self._steps, None)
        self.is_finished = self.step is None
        if self.step is not None:
            self.on_begun()
        return self.step

    def compute(self, shard: Callable[[Any], None]) -> Step:
        """Call it for the batch of each shard that falls to this worker. Afterwards `.grad` is the mean over all."""
        step = self.step
        assert step is not None, "no step has begun"
        for batch in step:
            shard(batch)
        return step

    def agree(self, value: Any) -> Any:
        """The first worker's value, on all of them. Called by all at the same line."""
        if self.is_finished or self.run.is_closed:
            return value
        collectives = self.run.engine.collectives
        assert collectives is not None
        return collectives.broadcast(value)

    def finish(self) -> None:
        """The loop has come to its end, on every worker after the same step."""
        if self.is_finished or self.run.is_closed:
            return
        if self._steps is None:  # the run was at its end already
            self._steps = self.run.steps(0)
        elif self.step is not None and self.step.number + 1 < self._goal:
            self.run.stop("the trainer's loop has come to its end")
        if self.next() is not None:
            raise ConfigError(
                "the trainer's loop ended on this worker, and goes on elsewhere",
                hint="let it end by what all workers know alike: steps, epochs, or metrics",
            )
