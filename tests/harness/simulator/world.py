"""The simulated world: virtual time, and everything that happens in it."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from holdfast.core.words import KEY_DONE, KEY_SIZE, View
from holdfast.membership import messages as m
from holdfast.membership.machine import Machine
from holdfast.membership.view_rules import Timing
from tests.harness.simulator.books import Books
from tests.harness.simulator.faults import Faults
from tests.harness.simulator.feed import Feed
from tests.harness.simulator.hanging import Hanging
from tests.harness.simulator.hosts import Host
from tests.harness.simulator.ledger import Ledger
from tests.harness.simulator.network import Network
from tests.harness.simulator.pacing import Pacing
from tests.harness.simulator.rewinds import RewindBooks
from tests.harness.simulator.schedule import Schedule, Violation
from tests.harness.simulator.storage import Storage
from tests.harness.simulator.worker import Worker

TICK_S = 0.5
LOOK_S = 5.0
DEADLINE_S = 600.0
NAMES = ("alpha", "beta", "gamma", "delta", "epsilon")


class World:
    """Virtual time, the network, the ledger, hosts with their agents, and the books."""

    def __init__(
        self,
        schedule: Schedule,
        *,
        machine_class: type[Machine] = Machine,
        feed_class: type[Feed] = Feed,
        keep_trace: bool = False,
    ) -> None:
        self.schedule = schedule
        self.machine_class = machine_class
        self.feed_class = feed_class
        self.timing = Timing(start_wait_s=5.0, grace_s=0.3, turn_s=0.5, linger_s=5.0, rest_s_max=60.0)
        self.timing = replace(self.timing, late_s=0.5 if schedule.late else 0.0)
        self.rng = random.Random(schedule.seed)
        self.now = 0.0
        self.lines: list[str] | None = [] if keep_trace else None
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0
        self.workers: dict[str, Worker] = {}
        self.views: dict[int, View] = {}
        self.books = Books(self)
        self.hanging, self.pacing, self.rewinds = Hanging(self), Pacing(self), RewindBooks(self)
        self.ledger = Ledger(self)
        self.network = Network(self)
        self.storage = Storage(self)
        self.faults = Faults(self)
        names = NAMES[: schedule.hosts] if schedule.hosts > 1 else ("",)
        self.hosts = [Host(self, name) for name in names]
        self.done = False
        self.torn = 0  # planes that failed where others of the same group did not
        self.given_up = False  # two disagree, and nobody can say who is right; or it is the script's doing, or undone
        self.verdict = ""  # the kind of end that this was

    @property
    def steps_committed(self) -> int:
        return self.books.steps_committed

    # ---- time

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._queue, (self.now + delay_s, self._sequence, act))

    def trace(self, *what: Any) -> None:
        if self.lines is not None:
            self.lines.append(f"{self.now:8.3f} " + " ".join(map(str, what)))

    def run(self) -> None:
        schedule = self.schedule
        for number in range(schedule.workers + schedule.spares):
            host = self.hosts[number % len(self.hosts)]
            host.size += number < schedule.workers
            slot, host.slots = host.slots, host.slots + 1
            self.after(self.rng.uniform(0.0, 1.0), lambda host=host, slot=slot: host.spawn(slot))  # type: ignore[misc]
        for host in self.hosts:
            self.ledger.put(KEY_SIZE + host.name, host.size)
        for _ in range(schedule.faults):
            self.after(self.rng.uniform(0.0, 3.0 + schedule.steps * 0.4), self.faults.strike)
        rng = random.Random(f"pauses of {schedule.seed}")
        for _ in range(schedule.pauses):
            self.after(rng.uniform(2.0, 3.0 + schedule.steps * 0.4), lambda: self.faults.pause(rng))
        self.hanging.start()
        self.pacing.start()
        self.after(LOOK_S, self._look)
        while self._queue and not self._over():
            self.now, _, act = heapq.heappop(self._queue)
            if self.now > DEADLINE_S:
                raise Violation(f"not finished after {DEADLINE_S:.0f} s; {self.books.waiting()}")
            act()
        self.books.check_level()

    def _look(self) -> None:
        self.books.check_progress()
        self.after(LOOK_S, self._look)

    def living(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.alive and not worker.finished]

    def _over(self) -> bool:
        return self.given_up or (self.done and not self.living())

    def tick(self, worker: Worker) -> None:
        if worker.alive and not worker.finished:
            worker.take(m.Tick()) if not (worker.busy or worker.stopped) else None
            self.after(TICK_S, lambda: self.tick(worker))

    # ---- ends

    def ended(self, worker: Worker, effect: m.End) -> None:
        worker.agent.ended(worker, effect)

    def finish(self, worker: Worker) -> None:
        """It has applied the last step: its script ends."""
        self.trace(worker.id, "finished")
        worker.finished = True
        self.done = True
        self.after(0.01, lambda: worker.agent.write(lambda: self.ledger.put(KEY_DONE, {})))
        self.after(0.01, lambda: worker.agent.process_ended(worker))
