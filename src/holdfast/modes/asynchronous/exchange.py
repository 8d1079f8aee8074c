"""What goes between a worker and the servers while it computes: a thread that pushes, asks for units and pulls.

The training thread hands over gradients and says that it wants the next unit; it takes a unit with parameters that are
fresh enough. Where the bound on staleness allows it, all of that goes on while a batch is computed. The connection to
the servers belongs to this thread alone. What fails here is raised where the training thread takes.

The staleness bound is kept by the table of units (servers/units.py): a unit is given out when all that its parameters
must have is acknowledged, and they are pulled after that. A unit that a worker holds and has not begun keeps the others
waiting for nothing. So the next one is asked for as late as is early enough, by how long this worker's last unit took.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from holdfast.core.errors import HoldfastError, PeerError
from holdfast.modes.asynchronous.pacing import prepare_after_s, usual_lead_s
from holdfast.servers.compressing import Compressor
from holdfast.servers.port import ParameterServers, Ticket, Versions
from holdfast.servers.recipe import Settings
from holdfast.servers.units import Extras, Given
from holdfast.servers.units_port import Units

POLL_S = 0.005  # how long it looks at one thing while another may come
ACKNOWLEDGED_S = 120.0  # for an update; servers fail over in seconds
ASK_AGAIN_S = 0.002
Found = TypeVar("Found")


@dataclass(frozen=True)
class Update:
    """Of one of this worker's steps. `unit`: whose data it is of. `after`: what waits for what is to be acknowledged
    before, the rows of the same step."""

    unit: int
    gradients: Sequence[torch.Tensor | None]
    settings: Sequence[Settings]
    after: Sequence[Callable[[], None]] = ()


@dataclass(frozen=True)
class Ready:
    """A unit and the versions of the parameters that are staged for it; without a unit, nothing is left to do."""

    given: Given
    versions: Versions

    @property
    def missing(self) -> int:
        """How many updates that were acknowledged before the unit was given out the parameters lack: none, ever."""
        return max(0, self.given.finished - min(self.versions, default=self.given.finished))


@dataclass(frozen=True)
class Pushed:
    """An update that is acknowledged: what it was computed with, and the versions with which it is in."""

    ready: Ready
    versions: Versions

    @property
    def staleness(self) -> int:
        """How many updates of others came between, in the slice that had the most."""
        read_at = self.ready.versions
        return max((now - 1 - then for then, now in zip(read_at, self.versions, strict=True)), default=0)


@dataclass(frozen=True)
class Delay:
    """What the thread waits for. `usual`: for other workers, as the bound on staleness wants it."""

    what: str
    since: float
    usual: bool = False


@dataclass
class _Call:
    """Something that the training thread wants done with the connection, and waits for."""

    act: Callable[[], object]
    done: threading.Event = field(default_factory=threading.Event)
    found: object = None
    error: BaseException | None = None


@dataclass(frozen=True)
class _Prepare:
    """The next unit before `until` is wanted, and its parameters; not asked for before `at`."""

    until: int
    at: float


@dataclass(frozen=True)
class _Pushing:
    update: Update
    ticket: Ticket
    since: float


_Job = Update | _Call | Extras | _Prepare | None  # None: the end


class UpdateExchange:
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
        compressor: Compressor | None = None,
    ) -> None:
        self.clock = clock  # updates pushed: this thread's
        self._pushed: queue.SimpleQueue[Pushed] = queue.SimpleQueue()
        self._servers = servers
        self._units = units
        self._staged = staged
        self._staleness = staleness
        self._wake = wake
        self._compressor = compressor
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[Ready] = queue.SimpleQueue()
        self._handed_over = 0  # updates: the training thread counts them,
        self._settled = 0  # and this one those that are acknowledged
        self._held = 0  # units that this worker was given and has not pushed
        self._wanted: _Prepare | None = None  # a unit is wanted, and not asked for yet
        self._asked: float | None = None  # it was asked for, since when it is waited for
        self._given: Given | None = None
        self._pull: Ticket | None = None
        self._pushing: _Pushing | None = None
        self._of_unit: dict[int, Ready] = {}
        self._lead_s = 0.0  # how long it takes to have a unit, but for waiting for others
        self._asking_s = 0.0  # to have asked for one
        self._pulled_from = 0.0
        self._began = 0.0  # the training thread's: when it began its last unit,
        self._took_s = math.inf  # and how long the one before took it
        self._in: Delay | None = None  # a call that may last
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="holdfast-servers", daemon=True)
        self._thread.start()

    # ---- the training thread's side

    def prepare(self, until: int, *, ahead: bool = False) -> None:
        """Ask for the next unit before `until`, and pull for it. `ahead`: the unit before it begins only now."""
        now = time.monotonic()
        if ahead:
            self._began, now = now, now + prepare_after_s(self._took_s, self._lead_s)
        self._jobs.put(_Prepare(until, now))

    def push(self, update: Update) -> None:
        self._took_s = time.monotonic() - self._began
        self._handed_over += 1
        self._jobs.put(update)

    @property
    def has_room(self) -> bool:
        """At most one update is on its way, so that another one may be computed: each is as large as the model."""
        if self._failure is not None:
            raise self._failure
        return self._handed_over - self._settled <= 1

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

    def delay(self) -> Delay | None:
        """What is waited for, for the longest; None: nothing. From any thread."""
        pushing, pull, asked = self._pushing, self._pull, self._asked
        found = [self._in] if self._in is not None else []
        if pushing is not None:
            what = pushing.ticket.waits_for() or "the servers"
            found.append(Delay(f"{what} to acknowledge its update of step {pushing.update.unit}", pushing.since))
        if pull is not None:
            found.append(Delay(f"the parameters of {pull.waits_for() or 'the servers'}", self._pulled_from))
        elif asked is not None:
            found.append(Delay(self._units.waits_for() or "its next step", asked, usual=True))
        return min(found, key=lambda delay: (delay.usual, delay.since), default=None)

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
                try:
                    job = self._jobs.get(timeout=self._idle_s())
                except queue.Empty:
                    self._go_on()
                    continue
                if job is None:
                    self._settle()
                    return
                self._do(job)
                del job  # an update is as large as the model
                self._go_on()
        except Exception as error:
            self._failure = error
            self._wake()

    def _idle_s(self) -> float | None:
        """How long to wait for another job. None: until there is one."""
        if self._pull is not None or self._pushing is not None:
            return 0.0  # there is something else to wait for
        if self._asked is not None:
            return ASK_AGAIN_S
        if self._wanted is None or math.isinf(self._wanted.at):
            return None
        return max(0.0, self._wanted.at - time.monotonic())

    def _do(self, job: Update | _Call | Extras | _Prepare) -> None:
        if isinstance(job, Update):
            self._settle()
            self._push(job)
        elif isinstance(job, Extras):
            with self._at("the table of steps, for what travels to a worker that joins"):
                self._units.bring(job)
        elif isinstance(job, _Call):
            self._settle()
            try:
                job.found = job.act()
            except HoldfastError as error:
                job.error = error
            job.done.set()
        else:
            self._wanted = job

    def _push(self, update: Update) -> None:
        with self._at("the servers to acknowledge its rows"):
            for wait in update.after:
                wait()
        ticket = self._servers.push(
            update.gradients, update.settings, clock=self.clock + 1, copy=False, compressor=self._compressor
        )
        self._pushing = _Pushing(update, ticket, time.monotonic())
        if self._wanted is not None:
            self._ask(self._wanted.until)  # the unit took less time than the one before

    def _ask(self, until: int) -> None:
        began = time.monotonic()
        with self._at("the table of steps"):
            self._units.ask(until, self.clock + self._held, self._staleness)
        self._wanted, self._asked = None, time.monotonic()
        self._asking_s = self._asked - began

    def _go_on(self) -> None:
        if self._wanted is not None and self._wanted.at <= time.monotonic():
            self._ask(self._wanted.until)
        if self._asked is not None:
            self._given = self._units.answer()
            if self._given is not None:
                self._asked, self._pulled_from = None, time.monotonic()
                self._held += not self._given.is_over
                self._pull = self._servers.pull(self._staged)
        if self._pull is not None:
            self._look_at_pull(self._pull)
            if self._pushing is not None and self._pushing.ticket.done:
                self._acknowledged(self._pushing, 0.0)
        elif self._pushing is not None:
            self._acknowledged(self._pushing, POLL_S if self._asked is None else ASK_AGAIN_S)

    def _look_at_pull(self, pull: Ticket) -> None:
        try:
            versions = pull.wait(POLL_S)
        except TimeoutError:
            return
        assert self._given is not None
        self._pull = None
        self._lead_s = usual_lead_s(self._lead_s, self._asking_s + time.monotonic() - self._pulled_from)
        ready = Ready(self._given, versions)
        if ready.given.unit is not None:
            self._of_unit[ready.given.unit] = ready
        self._ready.put(ready)
        self._wake()

    def _acknowledged(self, pushing: _Pushing, patience_s: float) -> None:
        """Look whether it is."""
        try:
            versions = pushing.ticket.wait(patience_s)
        except TimeoutError:
            if time.monotonic() - pushing.since > ACKNOWLEDGED_S:
                raise PeerError(f"{pushing.ticket.waits_for()}: no answer within {ACKNOWLEDGED_S:g} s") from None
            return
        unit, self._pushing = pushing.update.unit, None
        self._settled += 1
        self._wake()
        with self._at("the table of steps"):
            self._units.tell(used=unit)
        self.clock += 1
        self._held -= 1
        if (ready := self._of_unit.pop(unit, None)) is not None:
            self._pushed.put(Pushed(ready, versions))

    def _settle(self) -> None:
        """What was pushed is acknowledged when this returns."""
        while self._pushing is not None:
            self._acknowledged(self._pushing, POLL_S)

    @contextmanager
    def _at(self, what: str) -> Iterator[None]:
        self._in = Delay(what, time.monotonic())
        try:
            yield
        finally:
            self._in = None
