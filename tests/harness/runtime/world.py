"""The simulated world: everything of one run, put together, and brought to its end."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from tests.harness.runtime.agent import Agent
from tests.harness.runtime.books import Books, Outcome
from tests.harness.runtime.faults import Faults
from tests.harness.runtime.ledger import LedgerService
from tests.harness.runtime.network import Network
from tests.harness.runtime.process import Process
from tests.harness.runtime.schedule import Schedule, Violation
from tests.harness.runtime.scripts import Script
from tests.harness.runtime.steadiness import Steadiness
from tests.harness.runtime.storage import Storage
from tests.harness.runtime.timeline import Timeline

LOOK_S = 5.0
DEADLINE_S = 1500.0


class World:
    def __init__(self, schedule: Schedule, expected: Outcome | None, *, keep_trace: bool = False) -> None:
        self.schedule = schedule
        self.timeline = Timeline(schedule.seed)
        self.lines: list[str] | None = [] if keep_trace else None
        self.is_lossy = schedule.faults > 0
        self.is_done = False  # a worker's script has come to its end
        self.kinds: set[tuple[str, str]] = set()  # of events, by worker
        self.when_told: dict[
            tuple[str, str], list[tuple[float, Callable[[], object]]]
        ] = {}  # what a scenario does then
        self.processes: dict[str, Process] = {}
        self.network = Network(self)
        self.books = Books(self, expected)
        self.ledger = LedgerService(self)
        self.storage = Storage(self)
        self.steadiness = Steadiness(self)
        self.faults = Faults(self)
        self.agent = Agent(self)

    def run(self) -> None:
        schedule, timeline = self.schedule, self.timeline
        self.agent.open(schedule.workers, schedule.spares)
        for _ in range(schedule.faults):
            self._plan_fault()
        self._look()
        self._end_leases()
        try:
            in_time = timeline.run(self._is_over, DEADLINE_S)
            if self.books.violation is not None:
                raise self.books.violation
            if not in_time:
                raise Violation(f"not finished after {timeline.now:.0f} s; {self.books.waiting()}")
        finally:
            self._close()

    def _plan_fault(self) -> None:
        rng, script, strike = self.timeline.rng, self.schedule.script, self.faults.strike
        if not self.schedule.in_steps:
            self.timeline.after(rng.uniform(0.0, 3.0 + script.steps * 0.4), strike)
            return
        step, delay_s = rng.randrange(script.steps), rng.choice((0.0, 0.02, 0.2, 1.0)) * rng.random()
        acts = self.books.when_applied.setdefault(step, [])
        acts.append(lambda: self.timeline.after(delay_s, strike))

    def _close(self) -> None:
        self.timeline.close()
        for process in self.processes.values():
            process.let_go()

    def _is_over(self) -> bool:
        return self.books.violation is not None or (self.is_done and not self.living())

    def _look(self) -> None:
        self.books.check_everybody_gets_on()
        self.timeline.after(LOOK_S, self._look)

    def _end_leases(self) -> None:
        self.ledger.end_leases()
        self.timeline.after(0.1, self._end_leases)

    def living(self) -> list[Process]:
        return [process for process in self.processes.values() if process.alive]

    def trace(self, *what: Any) -> None:
        if self.lines is not None:
            self.lines.append(f"{self.timeline.now:9.4f} " + " ".join(map(str, what)))

    def told(self, process: Process, kind: str, fields: dict[str, Any]) -> None:
        if self.lines is not None:
            self.trace(process.id, kind, fields)
        self.kinds.add((process.id, kind))
        for delay_s, act in self.when_told.pop((process.id, kind), []):
            self.timeline.after(delay_s, act)
        self.books.told(process, kind, fields)


@cache
def quiet_outcome(script: Script) -> Outcome:
    """What the script comes to where nothing goes wrong, on one worker."""
    world = World(Schedule(seed=0, script=script, workers=1, faults=0), None)
    world.run()
    return world.books.outcome
