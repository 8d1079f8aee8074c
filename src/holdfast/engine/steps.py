"""The step engine: one step after another, whoever owns the loop.

    while engine.next_step() < steps and not engine.stops_here():  # waits for the run's state: perhaps far ahead
        engine.begin()
        while not engine.reduce():             # False: there are shards to compute, perhaps those of a lost peer
            while (shard := engine.open_shard()) is not None:
                loss(model, shard.batch).backward()
                engine.contribute(shard)
        optimizer.step()                       # .grad is the mean over all shards, the same bits on every worker
        engine.applied()

Every call may raise WorkerEnded: this worker's end, and nobody's error. A client calls from one thread, whichever.
The two `for`s of a script (api/run.py, api/step.py) are one client; trainers that own their loop are others.

Owns the step under way and its open shard. The mode's capture handles the model around a shard, the mode's data plan
says which samples a shard has, and the worker's machine decides what comes next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from holdfast.core.errors import ConfigError, Evicted
from holdfast.core.spending import REDUCING
from holdfast.data.loader import BatchLoader
from holdfast.data.seeding import derive_seed, seed_everything
from holdfast.data.shards import ShardPlace, ShardPlan
from holdfast.detection.beat import Activity
from holdfast.devices.laps import DeviceLap
from holdfast.engine.checker import Checker
from holdfast.engine.collectives import Collectives
from holdfast.engine.gradients import Shares
from holdfast.engine.loops import Loops
from holdfast.engine.misuse import Misuse
from holdfast.engine.recovery.guarding import Guard
from holdfast.engine.reporting import Reporter
from holdfast.engine.worker import Worker
from holdfast.membership import messages as m
from holdfast.modes.capture import NOWHERE, GradientCapture
from holdfast.reduce.reduction import KeptMean, Number


@dataclass
class StepState:
    """What is known of a step, and how far this worker is with it."""

    number: int
    epoch: int
    ends_epoch: bool  # where a step need not be whole, certain when it is complete
    samples: int = 0  # that the mean is over, once it is complete
    metrics: Mapping[str, float] = field(default_factory=dict)
    gathered: Mapping[int, str] = field(default_factory=dict)  # by shard
    shards: tuple[int, ...] | None = None  # those that are in the mean; None: all
    skipped: bool = False  # its update is not applied: every .grad is None when it is complete
    begun: bool = False  # its shards were asked for
    complete: bool = False  # the mean is in place
    updated: bool = False  # an optimizer was called
    torn: bool = False  # an optimizer has begun its update, and has not come to its end

    def check_complete(self) -> None:
        if not self.complete:
            raise ConfigError(
                f"the loop over the shards of step {self.number} was left early",
                hint="write `for batch in step:` without a break; every shard counts",
            )


@dataclass
class Shard:
    """A shard that is open: its batch is fetched, the generators are seeded, no gradient is there."""

    number: int
    batch: Any
    counts: bool  # False: it is computed only to be compared
    place: ShardPlace
    began: float | DeviceLap
    recorded: dict[str, dict[int, Number]] = field(default_factory=dict)  # metric -> this shard's number -> value
    gathered: str | None = None

    def took(self, clock: Callable[[], float]) -> float | DeviceLap:
        """It ends here. On a device that is not the time at which it is done."""
        return clock() - self.began if isinstance(self.began, float) else self.began.end()

    def record(self, name: str, value: Number) -> None:
        """A metric of the shard. The step has the mean over all shards."""
        self.recorded.setdefault(name, {})[self.number] = value


class Wishes(Protocol):
    """What a script has asked for outside the shards: see engine/api/outside.py."""

    over: str  # why the script wants no further steps, where not all workers have asked for it

    def stops_before(self, step: int) -> str: ...

    def not_everywhere(self, reason: str) -> None: ...

    def takes_save(self) -> bool: ...

    def end_after(self, step: int, reason: str) -> None: ...


class StepEngine:
    """See the module."""

    def __init__(
        self,
        worker: Worker,
        *,
        plan: ShardPlan,
        loader: BatchLoader,
        capture: GradientCapture,
        loops: Loops,
        guard: Guard,
        misuse: Misuse,
    ) -> None:
        self.plan = plan
        self.until = 0  # the step at which the loop is expected to end: what is beyond it is not fetched beforehand
        self.current: StepState | None = None  # the step that was begun and is not applied
        self.open: Shard | None = None
        self.over = False  # the run was closed
        self.wishes: Wishes | None = None
        self.collectives: Collectives  # over what the members of the view hold
        self.checker: Checker | None = None  # for `holdfast check`
        self.watcher: Callable[[int, int, Shares], None] | None = None
        self.before_applied: Callable[[], None] | None = None  # for a client whose model is kept elsewhere, and copied
        self._worker = worker
        self._pulse = worker.spending
        self._loader = loader
        self._capture = capture
        self._data = loops.data
        self._losses = loops.losses
        worker.before_serving = lambda: self._data.serve(worker.machine.me)
        self._guard = guard
        self._misuse = misuse
        self._reporter = Reporter(
            worker.lines.events, worker.machine, workers=worker.attendance.workers, clock=worker.clock
        )
        self._pending: m.Compute | None = None  # the machine's word for the step that is not begun yet
        self._directive: m.Compute | None = None  # and for the one that is, until its shards are asked for
        self._todo: Iterator[tuple[int, bool]] | None = None  # shards to compute, and whether they count
        self._durations_s: list[float | DeviceLap] = []
        self._metrics: dict[str, float] = {}  # of the last step that had shards
        self._absence: AbstractContextManager[None] | None = None  # the training thread is in a shard

    # ---- a step

    def next_step(self) -> int:
        """The number of the next step: how many this run has applied. Waits until this worker can begin with it."""
        if self.current is not None:
            self.current.check_complete()
            return self.current.number + 1
        if self._pending is None:
            self._pulse.adopt()
            self._pulse.enter(Activity.WAITING, self._worker.machine.next or 0)
            self._pending = self._to_begin(self._worker.attendance.due() or self._worker.advance())
        self._worker.attendance.opens(self._pending.step, self.until)
        return self._pending.step

    def _next(self) -> int:
        """The same, where it has just been asked for."""
        return self._pending.step if self._pending is not None and self.current is None else self.next_step()

    def begin(self) -> StepState:
        """The next step. The one before must be applied."""
        assert self.current is None, f"step {self.current.number} is not applied"
        number = self._next()
        directive, self._pending = self._pending, None
        self._directive = directive if not self._worker.attendance.has_closed(number) else None
        self._todo = None
        self._reporter.begins(number)
        self._data.begin(number)
        self._capture.tables.begin_step()
        state = StepState(number, self._data.epoch(number), self._data.ends_epoch(number))
        self.current = state
        self.seed(number, "begin")
        self._pulse.enter(Activity.SCRIPT, number)
        return state

    def _to_begin(self, directive: m.Compute | m.Commit | m.Halt) -> m.Compute:
        """The step to begin with. The others may have taken it without this worker, which was long in its lines, was
        left out and is taken in again: then it is given the mean when it has begun the step, without shards."""
        if isinstance(directive, m.Commit):
            self._worker.put_back(directive)
            return m.Compute(directive.step, ())
        assert isinstance(directive, m.Compute), directive
        return directive

    def stops_here(self) -> bool:
        """Whether all workers stop before the next step, as their scripts have asked. Call it before `begin`.

        Waits for the others' word, where this worker's script has asked for it. False: the step is to be taken.
        """
        step, worker = self._next(), self._worker
        if self.wishes is not None and self.wishes.stops_before(step):
            return True
        while reason := worker.machine.stopping.wishes.for_step(step):
            self._pulse.enter(Activity.WAITING, step)
            worker.tell(m.StepRefused(step))
            directive = worker.advance()
            assert self.wishes is not None
            if isinstance(directive, m.Halt):
                self.wishes.end_after(step, directive.reason)
                return True
            self._pending = self._to_begin(directive)
            if isinstance(directive, m.Commit):
                return False
            if not worker.machine.stopping.wishes.for_step(step):  # else a view has come, in which all are asked again
                self.wishes.not_everywhere(reason)
        return False

    def open_shard(self) -> Shard | None:
        """The next shard that this worker computes now; None: there is none, and `reduce` says how it goes on."""
        step, worker = self._step(), self._worker
        assert self.open is None, f"shard {self.open.number} of step {step.number} was not contributed"
        step.begun = True
        self._pulse.enter(Activity.WAITING, step.number)
        if self._directive is not None:
            directive, self._directive = self._directive, None
            self._take_up(directive)
        if self._todo is None:
            return None
        found = next(self._todo, None)
        if found is None:
            self._todo = None
            worker.computed(step.number, self._durations_s, over=self.wishes.over if self.wishes is not None else "")
            return None
        number, counts = found
        device = self._capture.device
        began = self._worker.clock() if device is None else DeviceLap(device)
        place = self._data.place(step.number, number)
        assert place is not None, f"step {step.number} has no shard {number}"
        self._absence = worker.attendance.away(step.number)
        self._absence.__enter__()
        try:
            self._pulse.enter(Activity.LOADING, step.number)
            batch = self._fetch(place, counts=counts)
            self._pulse.enter(Activity.SHARD, step.number)
            self._capture.before_shard(self.plan.weight(*place))
            seed_everything(derive_seed(self.plan.seed, *place))
        except BaseException:
            self.put_down()
            raise
        self.open = Shard(number, batch, counts, place, began)
        return self.open

    def contribute(self, shard: Shard) -> bool:
        """The shard's gradients are there. False: the step was closed without it, and has no further shards here."""
        step, worker = self._step(), self._worker
        assert shard is self.open, f"shard {shard.number} of step {step.number} is not open"
        self._pulse.enter(Activity.WAITING, step.number)
        self.put_down()
        late = worker.attendance.has_closed(step.number)
        sums = worker.gradients.sums if shard.counts else None
        collector = worker.audits.collector(shard.number, sums, shard.recorded) if not late else NOWHERE
        if self.checker is not None:
            collector = self.checker.collector(shard.number, collector, shard.recorded, counts=shard.counts)
        self._capture.after_shard(shard.number, collector)
        if shard.counts and not late:
            self._capture.tables.after_shard(shard.number, self.plan.weight(*shard.place) / self.plan.shards)
        if shard.counts:
            self._durations_s.append(shard.took(self._worker.clock))
        if late:
            worker.attendance.too_late([float(one) for one in self._durations_s])
            self._todo = None
            return False
        if shard.counts:
            worker.gradients.record(shard.recorded)
            if shard.gathered is not None:
                worker.gradients.gather(shard.number, shard.gathered)
        return True

    def look_at(self, number: int) -> tuple[Any, ShardPlace]:
        """The batch of a shard that another worker hands in, for a client that goes through its lines all the same."""
        step = self._step()
        assert self.open is None
        place = self._data.place(step.number, number)
        assert place is not None, f"step {step.number} has no shard {number}"
        batch = self._fetch(place, counts=False)
        self._capture.before_shard()
        return batch, place

    def forget_look(self) -> None:
        """What these lines left in gradients and buffers is nobody's."""
        self._capture.before_shard()

    def put_down(self) -> None:
        """No shard is open any more: it was contributed, or whoever computed it gives up."""
        absence, self._absence, self.open = self._absence, None, None
        if absence is not None:
            absence.__exit__(None, None, None)

    def reduce(self) -> bool:
        """Wait for what the others bring. True: the mean is in `.grad`. False: go on with `open_shard`."""
        step = self._step()
        if not step.begun or self._todo is not None or self._directive is not None:
            return False
        self._pulse.enter(Activity.WAITING, step.number)
        missed = self._worker.attendance.missed(step.number)
        directive = m.Commit(step.number, received=True) if missed is not None else self._worker.advance()
        if isinstance(directive, m.Compute):
            self._take_up(directive)
            return False
        assert isinstance(directive, m.Commit), directive
        self._load(step, missed)
        self._pulse.enter(Activity.SCRIPT, step.number)
        return True

    def applied(self) -> None:
        """The client's lines for the step are done: optimizers, schedulers, whatever belongs to it."""
        step = self._step()
        step.check_complete()
        if self.before_applied is not None:
            self.before_applied()
        self.current = None
        self._pulse.enter(Activity.WAITING, step.number)
        self._worker.attendance.ends(step.number)
        self._losses.applied(step.metrics, skipped=step.skipped)
        self._data.applied(step.shards)
        self._capture.buffers.rebase()
        optimizers, present = self._worker.audits.calls, self._capture.has_gradients
        calls = optimizers.applied(step.number)
        view = self._worker.machine.view  # that of this step: what follows may enter the next
        self._misuse.applied(step.number, calls, has_gradients=present, stray=optimizers.stray)
        self._worker.applied(step.number, save=self.wishes is not None and self.wishes.takes_save())
        made = self._data.samples_made(step.number, step.samples)
        self._reporter.applied(step.number + 1, self.until, step.metrics, made)
        if self.watcher is not None:
            counted = self._worker.gradients.counted.get(step.number, ())
            self.watcher(step.number, view.number if view else 0, counted)

    def close(self) -> None:
        """No further steps. Loader processes end."""
        self._loader.close()
        self._worker.audits.calls.close()

    def finish_tables(self) -> None:
        """The loop is over: what it sent to embedding tables is acknowledged when this returns."""
        self._capture.tables.begin_step()
        self._capture.tables.flush()

    def drop(self) -> None:
        """The step that was begun is not: no shard of it was asked for, and whoever asks next is given it again."""
        step = self._step()
        assert not step.begun
        self.current, self._pending, self._directive = None, self._directive or m.Compute(step.number, ()), None

    def seed(self, step: int, place: str) -> None:
        """Every line of a loop begins with generators that follow from the step, on a joiner too."""
        seed_everything(derive_seed(self.plan.seed, step, place))

    # ---- its parts

    def _step(self) -> StepState:
        assert self.current is not None, "no step was begun"
        if self.over:  # nobody is told any more what this worker waits for
            raise ConfigError(
                f"the run was closed in the middle of step {self.current.number}, and the step goes on",
                hint="call run.close() after the loops; run.stop(reason) ends the training after a step",
            )
        return self.current

    def _take_up(self, directive: m.Compute) -> None:
        """Shards of this step to compute: the first, or those that a lost peer has left."""
        step, worker = self._step(), self._worker
        passed = worker.rewinding.passed
        worker.begin(step.number)
        self._read_ahead(step.number)
        self._durations_s = []
        shards = self._there(step, directive.shards) if step.number not in passed else ()
        if shards:
            self._expect(step.number)
        self._todo = self._to_compute(step, shards, worker.audits.missing(directive, passed))

    def _read_ahead(self, step: int) -> None:
        """What the next step needs, if it is this worker's to bring that."""
        if self.plan.handed is None:
            return
        machine = self._worker.machine
        self._pulse.enter(Activity.LOADING, step)
        self._worker.gradients.ahead = self._data.ahead(step, machine.me, machine.keepers())
        self._pulse.enter(Activity.WAITING, step)

    def _to_compute(
        self, step: StepState, shards: tuple[int, ...], audited: tuple[int, ...]
    ) -> Iterator[tuple[int, bool]]:
        for shard in shards:
            yield shard, True
        for shard in self._there(step, audited):
            yield shard, False
        if self.checker is not None:
            for shard in self.checker.again(step.number, shards):
                yield shard, False

    def _there(self, step: StepState, shards: tuple[int, ...]) -> tuple[int, ...]:
        """At the end of an epoch a step may have fewer shards than were handed out."""
        return tuple(shard for shard in shards if self._data.place(step.number, shard) is not None)

    def _fetch(self, place: ShardPlace, *, counts: bool) -> Any:
        if self.checker is None:
            return self._loader.get(*place)
        return self.checker.batch(self._loader, place, counts=counts)

    def _expect(self, step: int) -> None:
        """Tell the loader which shards come next, as long as the view holds."""
        machine = self._worker.machine
        upcoming = self._data.upcoming(
            step,
            machine.assigned,
            machine.shares.get(machine.me, ()),
            room=machine.room,
            until=self.until,
            passed=self._worker.rewinding.passed,
        )
        self._loader.expect(upcoming)

    def _load(self, step: StepState, missed: KeptMean | None) -> None:
        """Put the mean where the client's lines expect it."""
        began = self._worker.clock()
        kept = self._worker.loaded(step.number, self._guard.inspect, missed)
        self._pulse.took(REDUCING, began)
        self._pulse.reduced_bytes += kept.memory.nbytes
        passed = step.number in self._worker.rewinding.passed
        if self.plan.handed is not None:
            self._data.told(step.number, kept.ahead)
        step.shards = kept.shards
        step.samples = self._data.samples(step.number, kept.shards) if not passed else 0
        step.ends_epoch = self._data.ends_epoch(step.number, kept.shards)
        if kept.shards != ():
            self._metrics = dict(kept.metrics) if not passed else {}
        step.metrics = self._metrics if kept.shards != () and not passed else _Unknown(self._metrics)
        step.gathered = kept.gathered
        self.seed(step.number, "apply")
        step.complete = True
        if self.checker is not None:
            self.checker.loaded(step.number)
        if kept.shards != ():
            is_zero = partial(self._capture.is_zero, kept) if self._capture.device is not None else None
            self._misuse.loaded(step.number, has_gradients=self._capture.has_gradients, is_zero=is_zero)
        if kept.over and self.wishes is not None:
            # Whoever brings something to the next step has this mean, and so knows it too. After this one already those
            # who have it might finish and be gone before the others had it.
            self.wishes.end_after(step.number + 2, kept.over)
        try:
            step.skipped = self._guard.judge(kept)
        except Evicted:
            step.complete = False  # the run goes back: a script that ends here has not finished
            raise


class _Unknown(dict[str, float]):
    """The metrics of a step that nobody computed, or another worker by itself: a script may print any of them."""

    def __missing__(self, name: str) -> float:
        return float("nan")
