"""Virtual time: tasks that take turns, one at a time, and a clock that jumps to the next thing that happens.

A task is a greenlet: it runs until it waits, and gives the turn back with what it waits for. Nothing else runs
meanwhile, so a run follows from its seed alone. A process that is killed is never given a turn again: none of its
`finally` clauses run, as it is with SIGKILL.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

import torch
from greenlet import GreenletExit, getcurrent, greenlet  # type: ignore[import-untyped]

TURNS_MAX = 200_000  # in one run; what takes more goes round in circles
WAKE_S = 2e-4  # a thread that is woken has its turn up to so much later


class Task:
    """One thread of a process."""

    def __init__(self, timeline: Timeline, owner: Any, name: str, run: Callable[[], object]) -> None:
        self.owner = owner
        self.name = name
        self.ended = False
        self.failure: BaseException | None = None
        self.turn = 0  # counts what it has waited for: a wake-up for an earlier wait is none
        self.grad_mode = True  # torch keeps it by thread, and all tasks are in one
        self._timeline = timeline
        self._waiting: list[Task] = []
        self.greenlet = greenlet(lambda: self._run(run), parent=timeline.hub)

    def _run(self, run: Callable[[], object]) -> None:
        try:
            run()
        except GreenletExit:
            pass
        except BaseException as error:
            self.failure = error
        self.ended = True
        for task in self._waiting:
            self._timeline.wake(task)
        if self.failure is not None and not self._timeline.over:
            self.owner.thread_failed(self, self.failure)

    def join(self, timeout: float | None = None) -> None:
        timeline = self._timeline
        until = timeline.now + timeout if timeout is not None else None
        while not self.ended and (until is None or timeline.now < until):
            self._waiting.append(timeline.current())
            timeline.wait(until - timeline.now if until is not None else None)

    def is_alive(self) -> bool:
        return not self.ended


class Timeline:
    def __init__(self, seed: object) -> None:
        self.now = 0.0
        self.rng = random.Random(f"turns {seed}")
        self.over = False
        self.events = 0
        self.after_turn: Callable[[Any], object] | None = None  # called with the owner of a task that has had its turn
        self._queue: list[tuple[float, int, Callable[[], object]]] = []
        self._sequence = 0
        self.hub = getcurrent()
        self._tasks: list[Task] = []
        self._by_greenlet: dict[greenlet, Task] = {}

    def at(self, when: float, act: Callable[[], object]) -> None:
        self._sequence += 1
        heapq.heappush(self._queue, (when, self._sequence, act))

    def after(self, delay_s: float, act: Callable[[], object]) -> None:
        self.at(self.now + delay_s, act)

    def run(self, is_over: Callable[[], bool], deadline_s: float) -> bool:
        """Until it is over; False: not before the deadline, or nothing is left that could happen."""
        while not is_over():
            if not self._queue:
                return False
            when, _, act = heapq.heappop(self._queue)
            if when > deadline_s or self.events > TURNS_MAX:
                return False
            self.now = max(self.now, when)
            self.events += 1
            act()
        return True

    # ---- tasks

    def start(self, owner: Any, name: str, run: Callable[[], object]) -> Task:
        task = Task(self, owner, name, run)
        self._tasks.append(task)
        self._by_greenlet[task.greenlet] = task
        self.wake(task)
        return task

    def current(self) -> Task:
        return self._by_greenlet[getcurrent()]

    def wait(self, timeout_s: float | None) -> None:
        """Called by a task: it has its turn again when it is woken, or after so long."""
        if self.over:
            raise GreenletExit
        task = self.current()
        task.turn += 1
        if timeout_s is not None:
            turn = task.turn
            self.after(max(timeout_s, 0.0), lambda: self._resume(task, turn))
        task.grad_mode = torch.is_grad_enabled()
        self.hub.switch()
        if self.over:
            raise GreenletExit

    def wake(self, task: Task) -> None:
        turn = task.turn
        self.after(self.rng.random() * WAKE_S, lambda: self._resume(task, turn))

    def _resume(self, task: Task, turn: int) -> None:
        if task.ended or task.turn != turn or not task.owner.alive:
            return
        if task.owner.stopped_until > self.now:
            self.at(task.owner.stopped_until, lambda: self._resume(task, turn))
            return
        task.turn += 1
        torch._C._set_grad_enabled(task.grad_mode)
        task.greenlet.switch()
        torch._C._set_grad_enabled(True)
        if self.after_turn is not None:
            self.after_turn(task.owner)

    def close(self) -> None:
        """Let go of everything that still waits."""
        self.over = True
        for task in self._tasks:
            if not task.ended and task.greenlet:
                task.greenlet.throw(GreenletExit)
        torch._C._set_grad_enabled(True)
        self._tasks.clear()
        self._by_greenlet.clear()
        self._queue.clear()
