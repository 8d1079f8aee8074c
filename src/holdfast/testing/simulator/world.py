"""The simulated world: virtual time, the agent, faults, and the books that are compared with what machines decide."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from typing import Any

from holdfast.core.words import View
from holdfast.membership import messages as m
from holdfast.membership.machine import Machine
from holdfast.membership.view_rules import LedgerState, Timing
from holdfast.testing.simulator.ledger import Ledger
from holdfast.testing.simulator.network import Network
from holdfast.testing.simulator.schedule import Schedule, Violation
from holdfast.testing.simulator.worker import Worker

LEASE_S = 2.0
TICK_S = 0.5
DEADLINE_S = 400.0


class World:
    """Virtual time, the network, the agent, and the books."""

    def __init__(self, schedule: Schedule, *, machine_class: type[Machine] = Machine, keep_trace: bool = False) -> None:
        self.schedule = schedule
        self.machine_class = machine_class
        self.timing = Timing(start_wait_s=5.0, grace_s=0.3, propose_again_s=1.0, abandon_s=60.0)
        self.rng = random.Random(schedule.seed)
        self.now = 0.0
        self.lines: list[str] | None = [] if keep_trace else None
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = 0
        self.workers: dict[str, Worker] = {}
        self.views: dict[int, View] = {}
        self.ledger = Ledger(self)
        self.network = Network(self)
        self._incarnations: dict[int, int] = {}
        self.steps_committed = 0
        self.done = False
        self.agent_up = True

    # ---- time

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._queue, (self.now + delay_s, self._sequence, act))

    def trace(self, *what: Any) -> None:
        if self.lines is not None:
            self.lines.append(f"{self.now:8.3f} " + " ".join(map(str, what)))

    def run(self) -> None:
        for slot in range(self.schedule.workers + self.schedule.spares):
            self.after(self.rng.uniform(0.0, 1.0), lambda slot=slot: self.spawn(slot))  # type: ignore[misc]
        for _ in range(self.schedule.faults):
            self.after(self.rng.uniform(0.0, 3.0 + self.schedule.steps * 0.4), self.fault)
        while self._queue and not self._over():
            self.now, _, act = heapq.heappop(self._queue)
            if self.now > DEADLINE_S:
                waiting = {w.id: f"{w.machine.phase.value}: {w.machine.reason}" for w in self._living()}
                raise Violation(f"not finished after {DEADLINE_S:.0f} s; {waiting}")
            act()
        self._check_level()

    def _living(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.alive and not worker.finished]

    def _over(self) -> bool:
        return self.done and not self._living()

    # ---- the agent

    def spawn(self, slot: int) -> None:
        if self.done:
            return
        if not self.agent_up:
            self.after(0.5, lambda: self.spawn(slot))
            return
        number = self._incarnations[slot] = self._incarnations.get(slot, 0) + 1
        worker = Worker(self, f"w{slot}.{number}")
        self.workers[worker.id] = worker
        self.trace("agent starts", worker.id)
        self.notify(worker, self.ledger.state())
        self._tick(worker)

    def _tick(self, worker: Worker) -> None:
        if worker.alive and not worker.finished:
            worker.take(m.Tick()) if not (worker.busy or worker.stopped) else None
            self.after(TICK_S, lambda: self._tick(worker))

    def _gone(self, worker: Worker) -> None:
        """The process ended: the kernel closes its connections, the agent tells the ledger and replaces it."""
        worker.alive = False
        self.network.drop(worker, self.network.view_of(worker.id))

        def agent_sees() -> None:
            if not self.agent_up:
                self.after(0.2, agent_sees)
                return
            self.ledger.when_up(lambda: self.ledger.deregister(worker.id, dead=True))

        self.after(self.rng.choice((0.002, 0.01, 0.1)), agent_sees)

    def crash(self, worker: Worker) -> None:
        self.trace("crash", worker.id)
        self._gone(worker)
        slot = int(worker.id[1:].partition(".")[0])
        self.after(self.rng.uniform(0.2, 3.0), lambda: self.spawn(slot))

    def ended(self, worker: Worker, effect: m.End) -> None:
        if effect.kind == "evicted":
            self.crash(worker)
        else:
            if effect.kind == "done" and not self.done:
                raise Violation(f"{worker.id} thinks that the run is done")
            worker.finished = True
            self._gone(worker)

    def finish(self, worker: Worker) -> None:
        self.trace(worker.id, "finished")
        worker.finished = True
        self.done = True
        self.network.drop(worker, self.network.view_of(worker.id))

        def tell() -> None:
            self.ledger.done = True
            self.ledger.deregister(worker.id, dead=True)

        self.after(0.01, lambda: self.ledger.when_up(tell))

    # ---- the ledger, as workers reach it

    def ledger_call(self, worker: Worker, act: Callable[[], None]) -> None:
        def arrive() -> None:
            if worker.cut:
                return  # lost; the machine asks again
            if self.ledger.up:
                act()

        self.after(self.rng.choice((0.001, 0.005, 0.05)), arrive)

    def notify(self, worker: Worker, state: LedgerState) -> None:
        """Watches deliver in order and may lag; only the newest state counts."""
        if not worker.alive:
            return
        first = worker.ledger_news is None
        worker.ledger_news = state
        if not first:
            return

        def arrive() -> None:
            if worker.cut or worker.stopped:
                self.after(0.1, arrive)
                return
            news, worker.ledger_news = worker.ledger_news, None
            if news is not None:
                worker.take(m.LedgerSaw(news))

        self.after(self.rng.choice((0.001, 0.003, 0.03, 0.2)), arrive)

    def _lapse(self, worker: Worker, still: Callable[[], bool]) -> None:
        """The lease runs out if the worker does not renew it in time while the ledger is up."""

        def check() -> None:
            if not worker.alive or worker.finished or not still():
                return
            if not self.ledger.up:
                self.after(LEASE_S, check)  # a ledger that was away gives every lease its full time again
                return
            self.trace("lease of", worker.id, "ran out")
            self.ledger.deregister(worker.id, dead=False)

        self.after(LEASE_S, check)

    def fetch(self, worker: Worker, effect: m.Fetch) -> None:
        """The main thread fetches; it fails when no source is left, or none serves this step."""
        tries = 0

        def then() -> m.Event | None:
            nonlocal tries
            tries += 1
            live = [source for source in (self.workers[id] for id in effect.sources) if source.alive]
            if any(source.serving == effect.step for source in live):
                worker.state = effect.step
                return m.Loaded(effect.step)
            if any(source.machine.view == worker.machine.view and (source.state or 0) > effect.step for source in live):
                raise Violation(f"the state moved on while {worker.id} was fetching step {effect.step}")
            if live and tries < 30:  # they may not have got their last report yet
                worker.work(0.1, then, blocked=True)
            return None

        worker.work(self.rng.uniform(0.05, 0.6), then, blocked=True)

    # ---- faults

    def fault(self) -> None:
        living = [worker for worker in self._living() if not worker.stopped]
        if self.done or not living:
            return
        kind = self.rng.choice(("crash", "crash", "stop", "stop", "reset", "cut", "agent", "join", "leave"))
        worker = self.rng.choice(living)
        self.trace("fault:", kind, worker.id)
        getattr(self, f"_fault_{kind}")(worker)

    def _fault_crash(self, worker: Worker) -> None:
        self.crash(worker)

    def _fault_stop(self, worker: Worker) -> None:
        worker.stopped = True
        worker.stops += 1
        stop = worker.stops
        self._lapse(worker, lambda: worker.stopped and worker.stops == stop)

        def wake() -> None:
            worker.stopped = False
            if not worker.busy:
                worker.drain()

        self.after(self.rng.choice((0.3, 1.0, 3.0, 6.0)), wake)

    def _fault_reset(self, worker: Worker) -> None:
        """A connection breaks; both ends live."""
        number = self.network.view_of(worker.id)
        peers = [peer for peer in self.views[number].members if peer != worker.id] if number > 0 else []
        if peers:
            peer = self.rng.choice(peers)
            self.network.deliver(worker.id, peer, number, m.PeerLost(number, worker.id, "reset"))
            self.network.deliver(peer, worker.id, number, m.PeerLost(number, peer, "reset"))

    def _fault_cut(self, worker: Worker) -> None:
        """The worker cannot reach the ledger for a while."""
        worker.cut = True
        self._lapse(worker, lambda: worker.cut)
        self.after(self.rng.choice((0.5, 3.0, 5.0)), lambda: setattr(worker, "cut", False))

    def _fault_agent(self, worker: Worker) -> None:
        """The agent is killed, and with it the ledger; another one takes over later."""
        if not self.agent_up:
            return
        self.agent_up = False
        self.ledger.go_down()

        def back() -> None:
            self.agent_up = True
            self.ledger.come_up()

        self.after(self.rng.choice((0.5, 2.0, 4.0)), back)

    def _fault_join(self, worker: Worker) -> None:
        self.ledger.size += 1
        self.ledger.when_up(self.ledger.changed)
        self.spawn(max(self._incarnations) + 1)

    def _fault_leave(self, worker: Worker) -> None:
        if len(self._living()) > 1:
            worker.take(m.LeaveAsked())

    # ---- the books

    def check_view(self, old: View | None, new: View) -> None:
        expected = old.number + 1 if old else 1
        if new.number != expected or len(set(new.members)) != len(new.members) or not new.members:
            raise Violation(f"view {new} does not follow {old}")
        if new.number in self.views and self.views[new.number] != new:
            raise Violation(f"two views of number {new.number}: {self.views[new.number]} and {new}")
        self.views[new.number] = new
        self.trace("view", new)

    def check_origin(self, worker: Worker, step: int) -> None:
        """Starting over is right only when nobody of the view before is left with state."""
        if step != 0:
            raise Violation(f"{worker.id} starts at step {step} without state")
        view = worker.machine.view
        assert view is not None
        if view != self.ledger.view:
            return  # it was stopped and does not know yet that the others went on
        before = self.views.get(view.number - 1)
        for member in (*view.members, *(before.members if before else ())):
            other = self.workers.get(member)
            if other is not None and other.alive and not other.finished and (other.state or 0) > 0:
                raise Violation(f"{worker.id} starts over while {member} is at step {other.state}")

    def number_of(self, worker: Worker) -> int:
        return worker.machine.view.number if worker.machine.view else 0

    def moved_on(self, number: int, effect: m.Reduce) -> str:
        """A member whose sums are no longer those of this view and step, seen as the runtime sees it: by its stamp."""
        for member, _ in effect.shards:
            stamp = self.workers[member].stamp
            next_step = not self.schedule.two_rounds and stamp[1] == effect.step + 1
            if stamp != (number, effect.step) and not next_step:
                return member
        return ""

    def broke_off(self, worker: Worker, number: int, effect: m.Reduce) -> str:
        """Over a network the sums must still be sent: a member that died before it had done so."""
        if not self.schedule.network:
            return ""
        for member, _ in effect.shards:
            peer = self.workers[member]
            if member != worker.id and not peer.alive and peer.reduced < (number, effect.step):
                return member
        return ""

    def check_reduction(self, effect: m.Reduce) -> None:
        real: list[int] = []
        for member, shards in effect.shards:
            missing = set(shards) - self.workers[member].computed.get(effect.step, set())
            if missing:
                raise Violation(f"step {effect.step}: {member} did not compute {sorted(missing)}")
            real += shards
        if sorted(real) != list(range(self.schedule.shards)):
            raise Violation(f"step {effect.step} would be committed with shards {sorted(real)}")

    def check_commit(self, worker: Worker, step: int) -> None:
        """In two rounds the mean is whole when every member has written its slice."""
        view = worker.machine.view
        assert view is not None
        wrote = [self.workers[member].reduced for member in view.members] if self.schedule.two_rounds else []
        if any(number < view.number or (number, at) < (view.number, step) for number, at in wrote):
            raise Violation(f"{worker.id} commits step {step} before all slices are there")

    def applied(self, worker: Worker, step: int) -> None:
        self.trace(worker.id, "applied step", step)
        self.steps_committed = max(self.steps_committed, step + 1)

    def _check_level(self) -> None:
        for worker in self.workers.values():
            if worker.finished and worker.state not in (None, self.schedule.steps) and self.done:
                left = worker.machine.leave_asked
                if not left:
                    raise Violation(f"{worker.id} ended at step {worker.state} of {self.schedule.steps}")
