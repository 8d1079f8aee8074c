"""The kernel of a simulated process (net/kernel.py): virtual time, tasks for threads, and what they wait for."""

from __future__ import annotations

import select
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from holdfast.net.mailbox import Mailbox
from tests.harness.runtime.timeline import Task, Timeline


class Waiters:
    """Tasks that wait for one thing."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._tasks: list[Task] = []

    def wait(self, timeout_s: float | None) -> None:
        with self.waiting():
            self._timeline.wait(timeout_s)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        task = self._timeline.current()
        self._tasks.append(task)
        try:
            yield
        finally:
            self._tasks.remove(task)

    def wake(self) -> None:
        for task in self._tasks:
            self._timeline.wake(task)


class VirtualEvent:
    def __init__(self, timeline: Timeline) -> None:
        self._waiters = Waiters(timeline)
        self._timeline = timeline
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._waiters.wake()

    def wait(self, timeout: float | None = None) -> bool:
        until = self._timeline.now + timeout if timeout is not None else None
        while not self._set and (until is None or self._timeline.now < until):
            self._waiters.wait(until - self._timeline.now if until is not None else None)
        return self._set


class VirtualCondition:
    """Its lock is free whenever somebody asks for it: tasks only change where they wait, and give it back there."""

    def __init__(self, timeline: Timeline) -> None:
        self._waiters = Waiters(timeline)
        self._timeline = timeline

    def __enter__(self) -> bool:
        return True

    def __exit__(self, *_: object) -> None: ...

    def notify(self) -> None:
        self._waiters.wake()

    notify_all = notify

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        until = self._timeline.now + timeout if timeout is not None else None
        while not (found := predicate()) and (until is None or self._timeline.now < until):
            self._waiters.wait(until - self._timeline.now if until is not None else None)
        return found


class VirtualPoll:
    """`select.poll` over virtual descriptors: each has a readiness and waiters."""

    def __init__(self, kernel: VirtualKernel) -> None:
        self._kernel = kernel
        self._masks: dict[int, int] = {}

    def register(self, fd: int, eventmask: int = select.POLLIN) -> None:
        if fd < 0:
            raise ValueError("closed")
        self._masks[fd] = eventmask

    def modify(self, fd: int, eventmask: int) -> None:
        if fd not in self._masks:
            raise KeyError(fd)
        self._masks[fd] = eventmask

    def unregister(self, fd: int) -> None:
        del self._masks[fd]

    def poll(self, timeout: float | None = None) -> list[tuple[int, int]]:
        timeline, known = self._kernel.timeline, self._kernel.descriptors
        until = timeline.now + timeout / 1000 if timeout is not None else None
        while True:
            found = [(fd, ready) for fd, mask in self._masks.items() if (ready := known[fd].readiness() & mask)]
            if found or (until is not None and timeline.now >= until):
                return found
            task = timeline.current()
            for fd in self._masks:
                known[fd].waiters._tasks.append(task)
            try:
                timeline.wait(until - timeline.now if until is not None else None)
            finally:
                for fd in self._masks:
                    known[fd].waiters._tasks.remove(task)


class VirtualKernel:
    """Of one process. `owner` is that process."""

    def __init__(self, timeline: Timeline, owner: Any, descriptors: dict[int, Any]) -> None:
        self.timeline = timeline
        self.descriptors = descriptors
        self._owner = owner

    def now(self) -> float:
        return self.timeline.now

    def sleep(self, seconds: float) -> None:
        until = self.timeline.now + seconds
        while self.timeline.now < until:
            self.timeline.wait(until - self.timeline.now)

    def start(self, name: str, run: Callable[[], object]) -> Task:
        return self.timeline.start(self._owner, name, run)

    def event(self) -> VirtualEvent:
        return VirtualEvent(self.timeline)

    def condition(self) -> VirtualCondition:
        return VirtualCondition(self.timeline)

    def poll(self) -> VirtualPoll:
        return VirtualPoll(self)


class VirtualMailbox(Mailbox):
    """The mailbox that ships, over a descriptor that is virtual."""

    def __init__(self, kernel: VirtualKernel) -> None:
        self._items = deque()
        self._raised = False
        self.waiters = Waiters(kernel.timeline)
        self.fd = len(kernel.descriptors)
        kernel.descriptors[self.fd] = self
        self._poll = VirtualPoll(kernel)  # type: ignore[assignment]
        self._poll.register(self.fd, select.POLLIN)

    def readiness(self) -> int:
        return select.POLLIN if self._raised else 0

    def wake(self) -> None:
        self._raised = True
        self.waiters.wake()

    def clear(self) -> None:
        self._raised = False
