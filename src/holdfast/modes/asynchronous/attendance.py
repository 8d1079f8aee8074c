"""What the loop of a worker does in the asynchronous mode: it takes units, pushes updates, and waits for no view.

Everything here runs in the training thread; what goes to and from the servers meanwhile is the exchange's. In its
membership a worker is alone (own_view.py). It comes with the servers' parameters (`arrives`), begins a step of its own
with fresh ones (`opens`), and hands its gradients over where the script calls its optimizers (`updates`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import torch

from holdfast.core.errors import Evicted, HoldfastError, PeerError
from holdfast.core.spending import JOINING, WAITING
from holdfast.ledger.port import Ledger
from holdfast.membership import messages as m
from holdfast.modes.asynchronous.arriving import arrive, collect
from holdfast.modes.asynchronous.exchange import Delay, Ready, Update, UpdateExchange
from holdfast.modes.asynchronous.extras import TravellingExtras
from holdfast.modes.asynchronous.given_steps import GivenSteps
from holdfast.modes.asynchronous.own_view import OwnView
from holdfast.modes.asynchronous.served_state import ServedState
from holdfast.modes.asynchronous.staleness import StalenessAccount
from holdfast.modes.port import Attendance, Runtime, TrainingParts
from holdfast.servers.codecs import Codec
from holdfast.servers.compressing import Compressor
from holdfast.servers.run_facts import author_of
from holdfast.servers.units import Extras
from holdfast.servers.units_port import ServerLines
from holdfast.tables.module import EmbeddingTable

CLOSE_S = 10.0
LISTEN_S = 0.2
SAY_S = 3.0  # who waits for servers for longer says so


class ServedAttendance(Attendance):
    state_elsewhere = True
    own_view = True

    def __init__(
        self,
        parts: TrainingParts,
        data: GivenSteps,
        staleness: int | None,
        *,
        adaptive: bool,
        codec: Codec | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._me = parts.me
        self._events = parts.events
        self._data = data
        self._staleness = staleness
        self._codec = codec
        self._clock = clock
        self._account = StalenessAccount(parts.events, bound=staleness, adaptive=adaptive)
        self._state = ServedState(parts.model, parts.optimizers)
        self._tables = [module for module in parts.model.modules() if isinstance(module, EmbeddingTable)]
        self._staged = self._state.staging()
        self._extras = TravellingExtras(parts.extras, self._state.optimizers, parts.events)
        self._reach = parts.servers
        self._lines: ServerLines | None = None
        self._view: OwnView | None = None
        self._runtime: Runtime | None = None
        self._exchange: UpdateExchange | None = None
        self._preparing = False  # the next unit is asked for
        self._next: Ready | None = None  # and is there, its parameters staged
        self._gradients: dict[int, torch.Tensor] = {}
        self._called: set[int] = set()  # the optimizers that were called in this step
        self._step = 0
        self._met = 0  # the newest wish for extras that this worker has met
        self._has_pushed = False
        self._done_until: int | None = None  # nothing is left to do before this unit
        self._said: set[str] = set()  # what it waits for, in its events

    # ---- alone in its view

    def ledger(self, ledger: Ledger) -> Ledger:
        self._view = OwnView(ledger, self._me)
        return self._view

    def attach(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def workers(self, members: tuple[str, ...]) -> tuple[str, ...]:
        return (self._view.registered() if self._view is not None else ()) or members

    # ---- the state

    def arrives(self, search: Callable[[], int | None]) -> int | None:
        runtime = self._running()
        with runtime.spending.during(JOINING):
            self._lines = lines = self._reach()
            arrival = arrive(
                lines, self._state, self._data, self._staged, extras=self._extras, search=search, wait=runtime.listen
            )
        self._exchange = UpdateExchange(
            lines.parameters,
            lines.units,
            self._staged,
            staleness=self._staleness,
            clock=arrival.clock,
            wake=runtime.wake,
            compressor=Compressor(self._codec) if self._codec is not None else None,
        )
        return arrival.step

    def collect(self) -> None:
        assert self._lines is not None and self._exchange is not None
        versions = collect(self._lines, self._exchange, self._state, self._data)
        following, left = self._data.begins_at
        self._events.write("captured", versions=list(versions), next=following, left=len(left))

    # ---- a step

    def opens(self, step: int, until: int) -> None:
        """Wait for the next unit, if this worker has none, and have its parameters in place if it is due."""
        data, self._step = self._data, step
        if not until or self._done_until == until:
            return
        if data.unit is None:
            data.is_done, self._done_until = False, None
            self._prepare(until)
            self._wait()
            assert self._next is not None
            data.unit, data.is_done = self._next.given.unit, self._next.given.is_over
            self._done_until = until if data.is_done else None
        if self._next is not None and self._next.given.wish > self._met:
            self._met = self._next.given.wish
            self._running_exchange().bring(Extras(self._met, step, self._extras.text()))
        if self._next is None or not (data.is_done or data.is_mine(step)):
            return
        self._wait_for_room()
        self._state.load(self._staged)
        self._next = None
        for table in self._tables:
            table.unit = data.unit
        if data.unit is not None and self._staleness != 0:
            self._prepare(until, ahead=True)  # while this one is computed

    def _prepare(self, until: int, *, ahead: bool = False) -> None:
        if not self._preparing and self._next is None:
            self._preparing = True
            self._running_exchange().prepare(until, ahead=ahead)

    def _wait(self) -> None:
        """Until the next unit is there. That is waiting for others, whatever the machine takes it for."""
        runtime = self._running()
        with runtime.spending.during(WAITING):
            while self._next is None:
                self._take()
        runtime.waiting.inside_steps()
        self._said.clear()

    def _wait_for_room(self) -> None:
        """Until at most one update is on its way: who is faster than the servers take them waits, and holds less."""
        runtime, exchange = self._running(), self._running_exchange()
        with runtime.spending.during(WAITING):
            while not self._has_room(exchange):
                self._say_delay(self._clock())
                runtime.listen(LISTEN_S)
        runtime.waiting.inside_steps()
        self._said.clear()

    def _has_room(self, exchange: UpdateExchange) -> bool:
        try:
            return exchange.has_room
        except (Evicted, PeerError) as error:
            self._running().end(m.End("evicted", str(error)))
            return False

    def _say_delay(self, now: float) -> None:
        """For what it waits: in its heartbeat, and, where it is the servers and lasts, in its events."""
        delay = self._running_exchange().delay() or Delay("its next step", now, usual=True)
        self._running().waiting.outside_steps(delay.what, ())
        if not delay.usual and now - delay.since >= SAY_S and delay.what not in self._said:
            self._said.add(delay.what)
            since = f"it has been waiting for {delay.what} since {now - delay.since:.0f} s"
            self._events.write("waiting", step=self._step, reason=since)

    def _take(self) -> None:
        """What is prepared, or a wait of a moment for it."""
        try:
            self._next = self._running_exchange().take()
        except (Evicted, PeerError) as error:
            self._running().end(m.End("evicted", str(error)))
        if self._next is None:
            self._say_delay(self._clock())
            self._running().listen(LISTEN_S)
        else:
            self._preparing = False

    def updates(self, optimizer: torch.optim.Optimizer) -> None:
        self._gradients |= self._state.take_gradients(optimizer)
        self._called.add(id(optimizer))
        if len(self._called) == len(self._state.optimizers) and not self._tables:
            self._push()

    def ends(self, step: int) -> None:
        """A step whose lines have not called every optimizer counts, too: the others wait for its clock.

        Rows are sent by lines that come after the optimizers': with tables, the update goes here.
        """
        self._push()
        if self._data.is_mine(step):
            self._data.unit = None
        self._gradients, self._called = {}, set()
        self._has_pushed = False

    def _push(self) -> None:
        unit, exchange = self._data.unit, self._running_exchange()
        if self._has_pushed or unit is None or not self._data.is_mine(self._step):
            return
        self._has_pushed = True
        gradients, self._gradients = self._gradients, {}
        self._account.take(exchange.take_pushed())
        settings = self._account.scaled(self._state.settings())
        # A captured state has an update only if its rows are there: those of a unit that is made again change nothing.
        rows = [table.store.sent() for table in self._tables]
        exchange.push(Update(unit, [gradients.get(number) for number in range(len(self._staged))], settings, rows))

    # ---- the end

    def close(self) -> None:
        exchange, lines = self._exchange, self._lines
        self._exchange = self._lines = None
        if exchange is None or lines is None:
            return
        self._account.take(exchange.take_pushed())
        self._account.tell()

        def leave() -> None:
            lines.units.forget(*author_of(self._me))
            lines.parameters.retire(*author_of(self._me))

        with suppress(HoldfastError):  # whoever is left finds in the ledger that this worker is gone
            exchange.call(leave, CLOSE_S)
        exchange.close(CLOSE_S)
        lines.close()

    def _running(self) -> Runtime:
        assert self._runtime is not None
        return self._runtime

    def _running_exchange(self) -> UpdateExchange:
        assert self._exchange is not None
        return self._exchange
