"""Where a script is, for what it asks of all workers at the same place."""

from __future__ import annotations

from holdfast.core.errors import ConfigError
from holdfast.detection.beat import Activity
from holdfast.engine.loops import Loops
from holdfast.engine.steps import StepEngine
from holdfast.engine.worker import Worker


class Position:
    def __init__(self, engine: StepEngine, worker: Worker, loops: Loops) -> None:
        self._engine = engine
        self._worker = worker
        self._loops = loops

    def passing(self) -> bool:
        """The lines that run now were run before this worker came, and are in the state already."""
        return self._worker.between_loops.are_passed

    def arrive(self) -> None:
        """Have the run's state already before the first loop, if the script asks for something there."""
        worker, loops = self._worker, self._loops
        if loops.count.passed or self._engine.current is not None or worker.machine.view is not None:
            return
        step = self._engine.next_step()
        worker.between_loops.let_them_read()
        if step or loops.count.done or loops.records.result("0.0") is not None:
            worker.between_loops.keep(step)
        worker.spending.enter(Activity.ENDED, step)

    def place(self, what: str) -> tuple[int, int, int]:
        """The first step not applied, whether it is being applied, and the loops passed."""
        step = self._engine.current
        if step is None:
            return self._worker.machine.next or 0, 0, self._loops.count.passed
        if not step.complete:
            raise ConfigError(
                f"{what} was called before the loop over the shards of step {step.number} had ended",
                hint="call it after `for batch in step:`, or between two loops over steps",
            )
        return step.number, 1, 0
