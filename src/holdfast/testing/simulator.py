"""A seeded simulator of workers, agent, ledger and network that runs the machine that ships.

Everything that can go wrong is drawn from one seed: delays, reordering between connections, connections that
break, workers that crash, stop and wake, leave and join, an agent (and with it the ledger) that goes away, a worker
cut off from the ledger, clocks that run apart. The same seed gives the same run, event for event.

The world keeps its own books and compares: it knows which shards each worker really computed and which steps it
really applied, and raises Violation when the machines' decisions break a promise.
"""

from __future__ import annotations

import argparse
import heapq
import random
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from holdfast.core.words import View
from holdfast.membership import messages as m
from holdfast.membership.machine import Machine
from holdfast.membership.view_rules import LedgerState, Registered, Timing

LEASE_S = 2.0
TICK_S = 0.5
DEADLINE_S = 400.0


class Violation(AssertionError):
    """A promise was broken."""


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What one simulated run consists of. `Schedule.draw(seed)` makes one up."""

    seed: int
    workers: int = 3
    spares: int = 0
    shards: int = 4
    steps: int = 5
    faults: int = 4
    two_rounds: bool = True
    network: bool = False  # sums travel with the reduction, which fails when their owner dies before it

    @classmethod
    def draw(cls, seed: int) -> Schedule:
        rng = random.Random(f"schedule {seed}")
        return cls(
            seed=seed,
            workers=rng.choice((1, 2, 3, 3, 4)),
            spares=rng.choice((0, 0, 0, 1)),
            shards=rng.choice((1, 2, 4, 5)),
            steps=rng.choice((3, 4, 6)),
            faults=rng.choice((0, 1, 2, 3, 4, 6)),
            two_rounds=(two_rounds := rng.random() < 0.5),
            network=not two_rounds and rng.random() < 0.5,
        )


class Ledger:
    """The simulated ledger and the agent that serves it: strongly consistent, sometimes away."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.up = True
        self.revision = 0
        self.view: View | None = None
        self.view_revision = 0
        self.created: dict[str, int] = {}
        self.dead: frozenset[str] = frozenset()
        self.size = world.schedule.workers
        self.done = False
        self._waiting: list[Callable[[], None]] = []

    def state(self) -> LedgerState:
        registered = tuple(Registered(id, created) for id, created in sorted(self.created.items(), key=lambda i: i[1]))
        return LedgerState(self.view, self.view_revision, registered, self.dead, self.size, "", self.done)

    def changed(self) -> None:
        self.revision += 1
        if self.up:
            state = self.state()
            for worker in self.world.workers.values():
                self.world.notify(worker, state)

    def when_up(self, act: Callable[[], None]) -> None:
        if self.up:
            act()
        else:
            self._waiting.append(act)

    def go_down(self) -> None:
        self.up = False

    def come_up(self) -> None:
        self.up = True
        waiting, self._waiting = self._waiting, []
        for act in waiting:
            act()
        self.changed()

    def register(self, id: str) -> None:
        if id not in self.created and id not in self.dead:
            self.created[id] = self.revision + 1
            self.changed()

    def deregister(self, id: str, *, dead: bool) -> None:
        if dead:
            self.dead |= {id}
        if self.created.pop(id, None) is not None or dead:
            self.changed()

    def compare_and_set_view(self, view: View, expected: int) -> None:
        if self.view_revision != expected:
            return
        self.world.check_view(self.view, view)
        self.view = view
        self.view_revision = self.revision + 1
        self.changed()


class Worker:
    """One simulated process: the shipped machine, the user's loop around it, and what it really holds."""

    def __init__(self, world: World, id: str) -> None:
        rng = world.rng
        self.world = world
        self.id = id
        schedule = world.schedule
        self.machine = world.machine_class(
            id, shards=schedule.shards, digest="same", two_rounds=schedule.two_rounds, timing=world.timing
        )
        self.alive = True
        self.stopped = False
        self.stops = 0
        self.busy = False  # the user's loop has the word
        self.blocked = False  # the runtime itself is in the middle of something
        self.cut = False  # from the ledger
        self.finished = False
        self.inbox: deque[m.Event] = deque()
        self.ledger_news: LedgerState | None = None  # held back while cut or stopped
        self.state: int | None = None  # steps applied to the real state
        self.computed: dict[int, set[int]] = {}
        self.stamp = (0, -1)  # (view, step) that its sums belong to: peers look at it after they read them
        self.result: int | None = None  # the step whose reduced gradient is really here
        self.serving: int | None = None
        self.reduced = (0, -1)  # (view, step) whose slice it has written
        self.clock_offset = rng.uniform(-100.0, 100.0)
        self.clock_rate = rng.uniform(0.95, 1.05)
        self.speed = rng.choice((0.05, 0.1, 0.1, 0.4))

    def clock(self) -> float:
        return self.world.now * self.clock_rate + self.clock_offset

    def take(self, event: m.Event) -> None:
        """An event arrives. While the user's loop computes, or the process is stopped, it waits in line."""
        if not self.alive or self.finished:
            return
        self.inbox.append(event)
        if not self.busy:
            self.drain()

    def drain(self) -> None:
        """Handle what has come so far, as the runtime does before it hands the word to the user's loop."""
        while self.inbox and self.alive and not (self.blocked or self.stopped or self.finished):
            event = self.inbox.popleft()
            for effect in self.machine.handle(event, self.clock()):
                self.world.trace(self.id, "does", effect)
                self.perform(effect)

    def work(self, duration_s: float, then: Callable[[], m.Event | None], *, blocked: bool = False) -> None:
        """The main thread is busy for a while, longer if the process is stopped meanwhile."""
        self.busy = True
        self.blocked = blocked

        def finish() -> None:
            if not self.alive:
                return
            if self.stopped:
                self.world.after(0.05, finish)
                return
            self.busy = self.blocked = False
            event = then()
            if event is not None:
                self.inbox.appendleft(event)
            self.drain()

        self.world.after(duration_s, finish)

    def perform(self, effect: m.Effect) -> None:
        getattr(self, "_" + type(effect).__name__.lower())(effect)

    def _register(self, effect: m.Register) -> None:
        self.world.ledger_call(self, lambda: self.world.ledger.register(self.id) if self.alive else None)

    def _deregister(self, effect: m.Deregister) -> None:
        self.world.ledger_call(self, lambda: self.world.ledger.deregister(self.id, dead=False))

    def _propose(self, effect: m.Propose) -> None:
        self.world.ledger_call(self, lambda: self.world.ledger.compare_and_set_view(effect.view, effect.expected))

    def _open(self, effect: m.Open) -> None:
        self.world.open(self, effect.view)

    def _drop(self, effect: m.Drop) -> None:
        self.world.drop(self, effect.view)

    def _broadcast(self, effect: m.Broadcast) -> None:
        view = self.machine.view
        assert view is not None
        for peer in view.members:
            if peer != self.id:
                self.world.send(self, peer, view, effect.message)

    def _give(self, effect: m.Give) -> None:
        if self.result != effect.step:
            raise Violation(f"{self.id} is to give the gradient of step {effect.step}, and has that of {self.result}")
        view = self.machine.view
        assert view is not None
        self.world.send(self, effect.to, view, m.Result(effect.step))

    def _serve(self, effect: m.Serve) -> None:
        if self.machine.next == 0 and self.state is None:
            self.state = 0  # the first state is the script's own
        if self.state != effect.step:
            raise Violation(f"{self.id} serves step {effect.step} but is at {self.state}")
        self.serving = effect.step

    def _fetch(self, effect: m.Fetch) -> None:
        self.world.fetch(self, effect)

    def _compute(self, effect: m.Compute) -> None:
        if self.state is None:
            self.world.check_origin(self, effect.step)
            self.state = effect.step
        if self.state != effect.step:
            raise Violation(f"{self.id} computes step {effect.step} with the weights of step {self.state}")
        self.stamp = (self.world.number_of(self), effect.step)
        oldest = effect.step if self.world.schedule.two_rounds else effect.step - 1  # one round: two sets of sums
        self.computed = {step: shards for step, shards in self.computed.items() if step >= oldest}

        def then() -> m.Event:
            self.computed.setdefault(effect.step, set()).update(effect.shards)
            return m.Computed(effect.step)

        self.work(0.001 + len(effect.shards) * self.speed * self.world.rng.uniform(0.5, 1.5), then)

    def _reduce(self, effect: m.Reduce) -> None:
        number = self.world.number_of(self)

        def then() -> m.Event:
            moved = self.world.moved_on(number, effect)
            if moved:
                return m.ReductionFailed(effect.step, moved, "it has moved on")
            lost = self.world.broke_off(self, number, effect)
            if lost:
                return m.ReductionFailed(effect.step, lost, "it closed the connection")
            self.world.check_reduction(effect)
            self.reduced = (number, effect.step)
            return m.Reduced(effect.step)

        self.work(self.world.rng.uniform(0.0, 0.02), then, blocked=True)

    def _commit(self, effect: m.Commit) -> None:
        if not effect.received:
            self.world.check_commit(self, effect.step)
        self.result = effect.step
        self.serving = None

        def then() -> m.Event | None:
            if self.state != effect.step:
                raise Violation(f"{self.id} applies step {effect.step} to a state that has had {self.state} steps")
            self.state = effect.step + 1
            self.world.applied(self, effect.step)
            if self.state == self.world.schedule.steps:
                self.world.finish(self)
                return None
            return m.Applied(effect.step)

        self.work(self.world.rng.uniform(0.001, 0.05), then)

    def _end(self, effect: m.End) -> None:
        self.world.ended(self, effect)


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
        self._arrival: dict[tuple[str, str], float] = {}
        self._groups: dict[str, int] = {}  # worker -> the view whose connections it has open
        self._parked: dict[tuple[str, int], list[m.Event]] = {}
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
        self.drop(worker, self._groups.get(worker.id, 0))

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
        self.drop(worker, self._groups.get(worker.id, 0))

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

    # ---- the network: connections belong to a view, keep order, and break as a whole

    def open(self, worker: Worker, view: View) -> None:
        self.views.setdefault(view.number, view)
        self._groups[worker.id] = view.number
        for event in self._parked.pop((worker.id, view.number), []):
            self.after(0.0, lambda event=event: worker.take(event))  # type: ignore[misc]
        for peer in view.members:
            other = self.workers.get(peer)
            if peer != worker.id and (other is None or not other.alive or self._groups.get(peer, 0) > view.number):
                self._deliver(peer, worker.id, view.number, m.PeerLost(view.number, peer, "refused"))

    def drop(self, worker: Worker, number: int) -> None:
        if self._groups.get(worker.id) != number or number <= 0:
            return
        self._groups[worker.id] = -number
        for peer in self.views[number].members:
            if peer != worker.id:
                self._deliver(worker.id, peer, number, m.PeerLost(number, worker.id, "closed"))

    def send(self, worker: Worker, peer: str, view: View, message: m.Message) -> None:
        self._deliver(worker.id, peer, view.number, m.Heard(view.number, worker.id, message))

    def _deliver(self, source: str, target: str, number: int, event: m.Event) -> None:
        """In order on one connection, in any order between them; parked while the target is not there yet."""
        delay = self.rng.choice((0.0005, 0.001, 0.002, 0.01, 0.2))
        at = max(self.now + delay, self._arrival.get((source, target), 0.0))
        self._arrival[(source, target)] = at

        def arrive() -> None:
            worker = self.workers.get(target)
            if worker is None or not worker.alive:
                return
            if abs(self._groups.get(target, 0)) < number:
                self._parked.setdefault((target, number), []).append(event)
            else:
                worker.take(event)

        self.after(at - self.now, arrive)

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
        number = self._groups.get(worker.id, 0)
        peers = [peer for peer in self.views[number].members if peer != worker.id] if number > 0 else []
        if peers:
            peer = self.rng.choice(peers)
            self._deliver(worker.id, peer, number, m.PeerLost(number, worker.id, "reset"))
            self._deliver(peer, worker.id, number, m.PeerLost(number, peer, "reset"))

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


def simulate(seed: int, *, machine_class: type[Machine] = Machine, keep_trace: bool = False, **changes: Any) -> World:
    """Run one schedule. Raises Violation with the seed in its text."""
    schedule = replace(Schedule.draw(seed), **changes)
    world = World(schedule, machine_class=machine_class, keep_trace=keep_trace)
    try:
        world.run()
    except AssertionError as error:
        trace = "\n".join(world.lines or [])
        raise Violation(f"seed {seed}: {error}\n{trace}") from error
    return world


def main() -> int:
    """python -m holdfast.testing.simulator [--seed N [--trace] | --schedules N]"""
    parser = argparse.ArgumentParser(description="Run schedules of failures against the protocol's machine.")
    parser.add_argument("--seed", type=int, help="one schedule, by its seed")
    parser.add_argument("--trace", action="store_true", help="with --seed: what happened, event for event")
    parser.add_argument("--schedules", type=int, default=10_000)
    args = parser.parse_args()
    if args.seed is not None:
        world = simulate(args.seed, keep_trace=args.trace)
        print("\n".join(world.lines or []))
        print(f"{world.schedule}\nno violation: {world.steps_committed} steps, {len(world.views)} views")
        return 0
    for seed in range(args.schedules):
        simulate(seed)
        if (seed + 1) % 10_000 == 0:
            print(f"{seed + 1:,} schedules, no violation", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
