"""What goes between a worker and the servers while it computes: a thread that pushes, asks for units and pulls.

The training thread hands over gradients and says that it wants the next unit; it takes a unit with parameters that are
fresh enough. Where the bound on staleness allows it, all of that goes on while a batch is computed. The connection to
the servers belongs to this thread alone. What fails here is raised where the training thread takes.

The staleness bound: before its step number c a worker's parameters have every update of everybody's steps before c - k.
Steps are counted by the workers' clocks, and a pull waits for the slowest one's (`clock_floor`).
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from holdfast.core.errors import HoldfastError, PeerError
from holdfast.servers.port import ParameterServers, Ticket, Versions
from holdfast.servers.recipe import Settings
from holdfast.servers.units import Extras, Given
from holdfast.servers.units_port import Units

POLL_S = 0.005  # how long it looks at one thing while another may come
ACKNOWLEDGED_S = 120.0  # for an update; servers fail over in seconds
ASK_AGAIN_S = 0.002
LOOK_S = 0.25
IDLE_S = 0.5  # without an answer
Found = TypeVar("Found")


@dataclass(frozen=True)
class Update:
    """Of one of this worker's steps. `unit`: whose data it is of."""

    unit: int
    gradients: Sequence[torch.Tensor | None]
    settings: Sequence[Settings]


@dataclass(frozen=True)
class Ready:
    """A unit and the versions of the parameters that are staged for it; without a unit, nothing is left to do."""

    given: Given
    versions: Versions


@dataclass(frozen=True)
class Pushed:
    """An update that is acknowledged: the versions that it was computed with, and those with which it is in."""

    read_at: Versions
    versions: Versions
    ahead: int = 0  # of the slowest worker, in steps, when it was begun; 0 where nobody looked

    @property
    def staleness(self) -> int:
        """How many updates of others came between, in the slice that had the most."""
        return max((now - 1 - then for then, now in zip(self.read_at, self.versions, strict=True)), default=0)


@dataclass
class _Call:
    """Something that the training thread wants done with the connection, and waits for."""

    act: Callable[[], object]
    done: threading.Event = field(default_factory=threading.Event)
    found: object = None
    error: BaseException | None = None


_Job = Update | _Call | Extras | int | None  # an int: prepare the next unit before this one; None: the end


class Exchange:
    """`staged`: where pulled parameters lie until the training thread has taken them. `wake` ends its wait."""

    def __init__(
        self,
        servers: ParameterServers,
        units: Units,
        staged: Sequence[torch.Tensor],
        *,
        staleness: int | None,
        clock: int,
        wake: Callable[[], None],
    ) -> None:
        self.clock = clock  # updates pushed: this thread's
        self._pushed: queue.SimpleQueue[Pushed] = queue.SimpleQueue()
        self._servers = servers
        self._units = units
        self._staged = staged
        self._staleness = staleness
        self._wake = wake
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[Ready] = queue.SimpleQueue()
        self._held = 0  # units that this worker was given and has not pushed
        self._until: int | None = None  # a unit before this one is asked for
        self._asked_at = 0.0
        self._given: Given | None = None
        self._pull: Ticket | None = None
        self._read_at: dict[int, Versions] = {}
        self._ahead: dict[int, int] = {}  # by unit
        self._looked_at = 0.0
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="holdfast-servers", daemon=True)
        self._thread.start()

    # ---- the training thread's side

    def prepare(self, until: int) -> None:
        """Ask for the next unit before `until`, and pull for it."""
        self._jobs.put(until)

    def push(self, update: Update) -> None:
        self._jobs.put(update)

    def bring(self, extras: Extras) -> None:
        """For those who came and wish for them."""
        self._jobs.put(extras)

    def take(self) -> Ready | None:
        """What was prepared; None: not yet. Raises what went wrong."""
        if self._failure is not None:
            raise self._failure
        try:
            return self._ready.get_nowait()
        except queue.Empty:
            return None

    def take_pushed(self) -> list[Pushed]:
        """What was acknowledged since the last time."""
        found: list[Pushed] = []
        while not self._pushed.empty():
            found.append(self._pushed.get_nowait())
        return found

    def call(self, act: Callable[[], Found], timeout_s: float) -> Found:
        """Have it done by the thread that owns the connection, and wait for it."""
        job = _Call(act)
        self._jobs.put(job)
        while not job.done.wait(min(timeout_s, POLL_S * 20)):
            timeout_s -= POLL_S * 20
            if self._failure is not None:
                raise self._failure
            if timeout_s <= 0:
                raise PeerError("the parameter servers did not answer in time")
        if job.error is not None:
            raise job.error
        return job.found  # type: ignore[return-value]

    def close(self, timeout_s: float) -> None:
        """After what was handed over before."""
        self._jobs.put(None)
        self._thread.join(timeout_s)

    # ---- the thread

    def _run(self) -> None:
        try:
            while True:
                busy = self._until is not None or self._pull is not None
                try:
                    job = self._jobs.get(timeout=ASK_AGAIN_S if self._pull is None else 0) if busy else self._jobs.get()
                except queue.Empty:
                    self._go_on()
                    continue
                if job is None:
                    return
                self._do(job)
                self._go_on()
        except Exception as error:
            self._failure = error
            self._wake()

    def _do(self, job: Update | _Call | Extras | int) -> None:
        if isinstance(job, Update):
            self._push(job)
        elif isinstance(job, Extras):
            self._units.bring(job)
        elif isinstance(job, _Call):
            try:
                job.found = job.act()
            except HoldfastError as error:
                job.error = error
            job.done.set()
        else:
            self._until, self._asked_at = job, time.monotonic()
            self._units.ask(job, self.clock + self._held)

    def _push(self, update: Update) -> None:
        ticket = self._servers.push(update.gradients, update.settings, clock=self.clock + 1, copy=False)
        versions = ticket.wait(ACKNOWLEDGED_S)
        self._units.tell(used=update.unit)
        self.clock += 1
        self._held -= 1
        if (read_at := self._read_at.pop(update.unit, None)) is not None:
            self._pushed.put(Pushed(read_at, versions, self._ahead.pop(update.unit, 0)))

    def _go_on(self) -> None:
        if self._until is not None and self._pull is None:
            self._given = self._units.answer()
            if self._given is None:
                self._wait_idle(self._until)
                return
            self._until = None
            self._held += not self._given.is_over
            self._pull = self._servers.pull(self._staged, clock_floor=self._floor(self._given))
        if self._pull is not None:
            try:
                versions = self._pull.wait(POLL_S)
            except TimeoutError:
                return
            self._pull = None
            assert self._given is not None
            if self._given.unit is not None:
                self._read_at[self._given.unit] = versions
                self._look_back(self._given.unit)
            self._ready.put(Ready(self._given, versions))
            self._wake()

    def _look_back(self, unit: int) -> None:
        """How far this worker is ahead, now and then: for whoever checks the bound."""
        now = time.monotonic()
        if now - self._looked_at > LOOK_S:
            self._looked_at = now
            slowest = min(self._servers.clocks().values(), default=self.clock)
            self._ahead[unit] = max(0, self.clock + self._held - 1 - slowest)

    def _floor(self, given: Given) -> int | None:
        if self._staleness is None or given.is_over:
            return None
        return max(0, self.clock + self._held - 1 - self._staleness)

    def _wait_idle(self, until: int) -> None:
        """If all units are given out, nobody must wait for the steps that this worker will not make."""
        now = time.monotonic()
        if self._held or now - self._asked_at < IDLE_S:
            return
        self._asked_at = now
        standing = self._units.standing()
        if standing is None or standing.next < until:
            return
        newest = max(self._servers.clocks().values(), default=0)
        if newest > self.clock:
            self.clock = self._servers.join(newest)
            self._units.ask(until, self.clock)  # what it is given now belongs to this clock
