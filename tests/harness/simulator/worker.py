"""One simulated process: the shipped machine, the user's loop around it, and what it really holds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from holdfast.membership import messages as m
from holdfast.membership.balance import Pace
from tests.harness.simulator.drifting import Drift, rules_of
from tests.harness.simulator.lying import Hardware
from tests.harness.simulator.network import AGAIN_S, SILENT_S
from tests.harness.simulator.rewinds import Rewinding
from tests.harness.simulator.schedule import Violation
from tests.harness.simulator.script import Script
from tests.harness.simulator.weights import Weights

if TYPE_CHECKING:
    from tests.harness.simulator.hosts import Host
    from tests.harness.simulator.world import World


class Worker:
    """One simulated process: the shipped machine, the user's loop around it, and what it really holds."""

    def __init__(self, world: World, host: Host, slot: int, id: str) -> None:
        rng = world.rng
        self.world = world
        self.id = id
        self.slot = slot
        self.agent = host
        self.host = host.name
        schedule = world.schedule
        self.machine = world.machine_class(
            id,
            shards=schedule.shards,
            digest="same",
            two_rounds=schedule.two_rounds,
            checkpoints=schedule.save_every > 0,
            timing=world.timing,
            rules=rules_of(schedule),
            step_rules=schedule.step_rules,
        )
        self.weights = Weights(schedule)
        self.script = Script(self, schedule.loops) if schedule.loops and not schedule.stands_in else None
        self.lines_at: dict[int, tuple[int, ...]] = {}  # step -> what its script's lines had done before it
        self.hardware = Hardware(schedule, id)
        self.drift = Drift(schedule, self)
        self.alive = True
        self.vanished = False  # with its host: nobody has closed its connections
        self.stopped = False
        self.stops = 0
        self.paused_until = 0.0  # its script waits for something
        self.busy = False  # the user's loop has the word
        self.blocked = False  # the runtime itself is in the middle of something
        self.cuts = 0  # between it and the ledger
        self.hampered_at = world.now  # when it was last stopped or cut off from the ledger
        self.finished = False
        self.inbox: deque[m.Event] = deque()
        self.feed = world.feed_class(self)
        self.rewinding = Rewinding(self)
        self.state: int | None = None  # steps applied to the real state
        self.computed: dict[int, set[int]] = {}
        self.stamp = (0, -1)  # (view, step) that its sums belong to: peers look at it after they read them
        self.result: int | None = None  # the step whose reduced gradient is really here
        self.serving: int | None = None
        self.served: tuple[int, ...] = ()  # what its script's lines had done when it began to
        self.means: dict[int, int] = {}  # steps whose mean it keeps for those left behind -> the step it really is of
        self.received: int | None = None  # the step that the mean which it was sent is really of
        self.saving = False  # its share of a checkpoint is on its way to storage
        self.reduced = (0, -1)  # (view, step) whose slice it has written
        self.clock_offset = rng.uniform(-100.0, 100.0)
        self.clock_rate = rng.uniform(0.95, 1.05)
        self.pace = Pace()
        self.speed = rng.choice((0.05, 0.1, 0.1, 0.4))

    @property
    def cut(self) -> bool:
        """From the ledger."""
        return self.cuts > 0

    @property
    def runs_threads(self) -> bool:
        return self.alive

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
            if self.rewinding.overtaken(event):
                return
            for effect in self.machine.handle(event, self.clock()):
                self.world.trace(self.id, "does", effect)
                self.perform(effect)
        if self.script is not None:
            self.script.look()

    def work(self, duration_s: float, then: Callable[[], m.Event | None], *, blocked: bool = False) -> None:
        """The main thread is busy for a while, longer if the process is stopped meanwhile."""
        self.busy = True
        self.blocked = blocked

        def finish() -> None:
            if not self.alive:
                return
            if self.stopped or (self.world.now < self.paused_until and not blocked):
                self.world.after(0.05, finish)
                return
            if not blocked and self.world.hanging.holds(self):
                self.world.after(0.2, finish)
                return
            self.busy = self.blocked = False
            event = then()
            if event is not None:
                self.inbox.appendleft(event)
            if not self.busy:
                self.drain()

        self.world.after(duration_s, finish)

    def perform(self, effect: m.Effect) -> None:
        getattr(self, "_" + type(effect).__name__.lower())(effect)

    def _register(self, effect: m.Register) -> None:
        self.feed.register(effect.while_view)

    def _deregister(self, effect: m.Deregister) -> None:
        self.feed.deregister()

    def _propose(self, effect: m.Propose) -> None:
        self.feed.propose(effect.view, effect.expected)

    def _publish(self, effect: m.Publish) -> None:
        self.feed.publish(effect.roll)

    def _knock(self, effect: m.Knock) -> None:
        """Threads of its own do this, so the loop may be busy. Who does not answer is tried again until time is up."""
        deadline = self.world.now + effect.within_s
        reached: set[str] = set()

        def knock() -> None:
            if self.stopped:
                self.world.after(AGAIN_S, knock)
                return
            reached.update(peer for peer in effect.peers if self.world.network.answers(self.id, peer))
            if len(reached) < len(effect.peers) and self.world.now < deadline:
                self.world.after(AGAIN_S, knock)
                return
            found = tuple(peer for peer in effect.peers if peer in reached)
            self.take(m.Knocked(effect.number, found, tuple(peer for peer in effect.peers if peer not in reached)))

        self.world.after(self.world.rng.choice((0.002, 0.01, 0.1)), knock)

    def _open(self, effect: m.Open) -> None:
        self.rewinding.check_entry(effect.view)
        self.world.network.open(self, effect.view)

    def _drop(self, effect: m.Drop) -> None:
        self.serving = None  # what was offered belongs to the view
        self.world.network.drop(self, effect.view)

    def _broadcast(self, effect: m.Broadcast) -> None:
        view = self.machine.view
        assert view is not None
        for peer in view.members:
            if peer != self.id:
                self.world.network.send(self, peer, view, effect.message)

    def _give(self, effect: m.Give) -> None:
        if self.result != effect.step:
            raise Violation(f"{self.id} is to give the gradient of step {effect.step}, and has that of {self.result}")
        view = self.machine.view
        assert view is not None
        self.world.workers[effect.to].weights.is_sent(effect.step, self.weights)
        self.world.network.send(self, effect.to, view, m.GivenMean(effect.step))

    def _keep(self, effect: m.Keep) -> None:
        self.means[effect.step] = self.result if self.result is not None else -1
        self.weights.keep(effect.step)

    def _catch(self, effect: m.Catch) -> None:
        """Whoever of them answers and has it sends it."""

        def then() -> m.Event:
            world = self.world
            live = [world.workers[source] for source in effect.sources if world.network.answers(self.id, source)]
            found = [source for source in live if effect.step in source.means]
            if found:
                self.received = found[0].means[effect.step]
                self.weights.is_sent(effect.step, found[0].weights)
            return m.Caught(effect.step, bool(found))

        self.work(self.world.rng.choice((0.001, 0.01, 0.1)), then, blocked=True)

    def _leftbehind(self, effect: m.LeftBehind) -> None:
        self.world.books.left_behind += len(effect.workers)

    def _caughtup(self, effect: m.CaughtUp) -> None:
        self.world.books.caught_up += 1

    def _serve(self, effect: m.Serve) -> None:
        if self.machine.next == 0 and self.state is None:
            self.state = 0  # the first state is the script's own
        if self.state != effect.step:
            raise Violation(f"{self.id} serves step {effect.step} but is at {self.state}")
        self.serving, self.served = effect.step, self.weights.lines

    def _fetch(self, effect: m.Fetch) -> None:
        """The main thread fetches; it fails when no source is left, or none serves this step."""
        tries = 0

        def then() -> m.Event | None:
            nonlocal tries
            tries += 1
            world = self.world
            live = [world.workers[source] for source in effect.sources if world.network.answers(self.id, source)]
            serving = [source for source in live if source.serving == effect.step]
            if serving:
                if not self.drift.fetched(serving, effect.step):
                    return m.SourcesDiffer(effect.step)
                if self.state is not None and self.state > effect.step:
                    raise Violation(f"{self.id} goes back from step {self.state} to {effect.step}")
                self.state = effect.step
                self._read(serving)
                return m.Loaded(effect.step)
            if any(source.machine.view == self.machine.view and (source.state or 0) > effect.step for source in live):
                raise Violation(f"the state moved on while {self.id} was fetching step {effect.step}")
            if tries < 30:  # they may not have got their last report yet
                self.work(0.1, then, blocked=True)
                return None
            self.world.ended(self, m.End("evicted", "the snapshot did not arrive"))
            return None

        self.work(self.world.rng.uniform(0.05, 0.6), then, blocked=True)

    def _read(self, sources: list[Worker]) -> None:
        for source in sources[:2]:
            if source.weights.lines != source.served:
                raise Violation(f"{self.id} reads the state of {source.id} while its script's lines change it")
            if source.served != sources[0].served:
                raise Violation(
                    f"{self.id} reads from {source.id} and {sources[0].id}, at different lines of the script"
                )
        self.weights.fetch(sources[0].weights)
        if self.script is not None:
            self.script.has_state()

    def _compute(self, effect: m.Compute) -> None:
        if self.state is None:
            self.world.books.check_origin(self, effect.step)
            self.state = effect.step
        if self.state != effect.step:
            raise Violation(f"{self.id} computes step {effect.step} with the weights of step {self.state}")
        if self.script is not None:
            self.script.handed(effect)
        else:
            self.compute(effect)

    def compute(self, effect: m.Compute) -> None:
        """The user's loop takes the step."""
        self.lines_at = {effect.step - 1: self.lines_at.get(effect.step - 1, ()), effect.step: self.weights.lines}
        self.stamp = (self.world.books.number_of(self), effect.step)
        oldest = effect.step if self.world.schedule.two_rounds else effect.step - 1  # one round: two sets of sums
        self.computed = {step: shards for step, shards in self.computed.items() if step >= oldest}

        def then() -> m.Event:
            shards = self.weights.there(effect.shards)
            self.computed.setdefault(effect.step, set()).update(shards)
            every = self.world.schedule.save_every
            due = bool(every) and (effect.step + 1) % every == 0
            said = self.hardware.computes(m.Compute(effect.step, shards, self.weights.there(effect.audits)))
            state, details = self.drift.said(effect.step)
            said = replace(said, state=state, details=details)
            pace = self.pace.took([each_s] * len(effect.shards))
            whole = self.world.schedule.step_rules.whole
            brings = None if whole else tuple(sorted(self.computed[effect.step]))
            return m.Computed(effect.step, due, self.saving, pace, said=said, shards=brings)

        noise = self.world.schedule.noise
        each_s = self.speed * self.world.rng.uniform(1.0 - noise, 1.0 + noise)
        self.work(0.001 + (len(effect.shards) + len(effect.audits)) * each_s, then)

    def _accuse(self, effect: m.Accuse) -> None:
        finding = effect.finding
        if finding.narrow:
            self.drift.narrow(finding.step)
        if finding.what == "state":
            self.drift.check_blamed(finding)
            self.world.books.disturbed()
        else:
            self.world.books.check_accused(finding)

    def _reduce(self, effect: m.Reduce) -> None:
        number = self.world.books.number_of(self)
        began = self.world.now

        def then() -> m.Event | None:
            books = self.world.books
            moved = books.moved_on(number, effect)
            if moved:
                return m.ReductionFailed(effect.step, moved, "it has moved on")
            lost = books.broke_off(self, number, effect)
            if lost:
                return m.ReductionFailed(effect.step, lost, "it closed the connection")
            stuck = books.stuck_on(self, effect)
            if stuck:
                roll = self.feed.roll_of(stuck)
                gave_up = roll is not None and roll.view == number
                if self.world.now - began > SILENT_S or gave_up or not self.feed.is_registered(stuck):
                    return m.ReductionFailed(effect.step, stuck, "it is silent")
                self.work(0.1, then, blocked=True)
                return None
            books.check_reduction(effect)
            self.reduced = (number, effect.step)
            self.weights.add(effect)
            return m.Reduced(effect.step)

        self.work(self.world.rng.uniform(0.0, 0.02), then, blocked=True)

    def _save(self, effect: m.Save) -> None:
        self.world.storage.save(self, effect)

    def _restore(self, effect: m.Restore) -> None:
        self.world.storage.restore(self)

    def _commit(self, effect: m.Commit) -> None:
        if self.rewinding.goes_back(effect.step):
            return
        if not effect.received:
            self.world.books.check_commit(self, effect.step)
        elif self.received not in (None, effect.step):
            raise Violation(f"{self.id} applies the mean of step {self.received} as that of {effect.step}")
        self.received = None
        self.result = effect.step
        self.serving = None

        def then() -> m.Event | None:
            if self.state != effect.step:
                raise Violation(f"{self.id} applies step {effect.step} to a state that has had {self.state} steps")
            self.state = effect.step + 1
            self.weights.apply(effect.step)
            self.drift.applied(effect.step)
            self.world.books.check_same(self)
            self.world.books.applied(self, effect.step)
            if self.script is not None:
                return self.script.applied(effect.step)
            if self.state == self.world.schedule.steps:
                self.world.finish(self)
                return None
            return m.Applied(effect.step)

        self.work(self.world.rng.uniform(0.001, 0.05), then)

    def _end(self, effect: m.End) -> None:
        if effect.save:
            assert self.state is not None
            self.world.rewinds.saved(self.state, self)
            self.world.storage.commit(self.state, self.weights)
        self.world.ended(self, effect)
