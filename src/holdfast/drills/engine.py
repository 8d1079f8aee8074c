"""The engine of drills: takes a run to its end while a plan breaks it, and says what came of it.

A plan is an iterator. It does to the nemesis what is due, and yields whenever nothing is: by the clock (by_time.py), or
by whatever else its author can see of the run. The engine looks at the run in between, mends what is due, and notices
when nothing moves any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from holdfast.drills.checking import Outcome
from holdfast.drills.nemesis import Nemesis
from holdfast.drills.trace import TraceEntry, TraceReader
from holdfast.testing.observed_run import Failed, Observed

LOOK_S = 0.02
HANGS_S = 180.0  # without a step or an event: the run is given up
TIMED_OUT = 124


@dataclass
class Engine:
    """Owned by one thread. `rest` waits until something may have changed; `told` hears of steps as they are applied."""

    run: Observed
    traces: TraceReader
    nemesis: Nemesis | None = None
    faults: Iterator[None] = field(default_factory=lambda: iter(()))
    rest: Callable[[float], None] = time.sleep
    told: Callable[[list[TraceEntry]], None] = lambda fresh: None
    plan_is_done: bool = False
    _moved: float = 0.0
    _heard: int = 0

    def go(self) -> int:
        """To the end of a run that was started: until its agents end, and none of them is to come back.

        Returns the worst exit code. A run in which nothing moves is given up, as if `timeout` had ended it.
        """
        self._moved = time.monotonic()
        while True:
            over = self.run.over() and not (self.nemesis is not None and self.nemesis.agent_is_away)
            self._look()
            if over:
                agents = [part.agent for part in self.run.running]
                return max(abs(agent.returncode) if agent is not None else 1 for agent in agents)
            if time.monotonic() - self._moved > HANGS_S:
                return TIMED_OUT
            self.rest(LOOK_S)

    def _look(self) -> None:
        self.run.look()
        fresh = self.traces.look()
        heard = sum(len(part.seen) for part in self.run.parts)
        if fresh or heard > self._heard:
            self._moved, self._heard = time.monotonic(), heard
        self.told(fresh)
        if self.nemesis is not None:
            self.nemesis.look(time.monotonic())
        if not self.plan_is_done:
            self.plan_is_done = next(self.faults, StopIteration) is StopIteration

    def outcome(self, code: int | None) -> Outcome:
        """What there is to see now. `code` None: it was not let to its end."""
        self.run.look()
        self.traces.look()
        run = self.run
        return Outcome(self.traces.trace, list(run.events), code, dict(run.digests), run.last_words())

    def finish(self) -> Outcome:
        """As `go`, where nothing but a good end will do: raises Failed otherwise."""
        outcome = self.outcome(self.go())
        if outcome.exit_code == TIMED_OUT:
            raise Failed(f"nothing moved for {HANGS_S:.0f} s, at step {self.run.step}:\n{outcome.last_words}")
        if outcome.exit_code:
            raise Failed(f"the run ended with exit code {outcome.exit_code}:\n{outcome.last_words}")
        if not self.plan_is_done:
            raise Failed(f"the run was over before all faults were done:\n{outcome.last_words}")
        if not outcome.digest:
            raise Failed(f"the workers ended with different weights: {outcome.digests}")
        return outcome
