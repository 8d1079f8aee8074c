"""What the user's script holds: a Run with its steps, and a Step with its shards.

The two `for`s of the user's loop are where failures are absorbed. A Step hands out this worker's shards; when they are
done it reduces, and if a peer died meanwhile it hands out that peer's shards too. When the inner loop ends, `.grad` is
the mean over all shards, on every worker with the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from holdfast.core.errors import ConfigError, Evicted
from holdfast.core.spending import REDUCING
from holdfast.core.words import KEY_DONE, encode_json
from holdfast.data.cursor import Cursor
from holdfast.data.loader import ShardLoader
from holdfast.data.seeding import derive_seed, seed_everything
from holdfast.data.shards import ShardPlan
from holdfast.detection.beat import Activity
from holdfast.detection.heartbeat import Heartbeat
from holdfast.events import EventLog
from holdfast.membership import messages as m
from holdfast.modes.diverging import Losses
from holdfast.modes.exact import NOWHERE, Exact
from holdfast.reduce.reduction import Kept
from holdfast.run.gradients import Shares
from holdfast.run.guarding import Guard
from holdfast.run.ledger_feed import LedgerFeed
from holdfast.run.reporting import Reporter
from holdfast.run.worker import Worker
from holdfast.state.digest import weights_digest
from holdfast.state.snapshot import Snapshot


class Loops:
    """How many loops over steps the script has been through. Travels with the snapshot: a joiner must know which of
    them, and of the lines between them, are in the state that it was given."""

    def __init__(self, losses: Losses, cursor: Cursor | None = None) -> None:
        self.done = 0  # by the state's account
        self.passed = 0  # by this process
        self.losses = losses  # of the last steps: they travel with the same part of the snapshot
        self.cursor = cursor  # elastic: and so does where the run is in its data

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done, **self.losses.state(), **(self.cursor.state() if self.cursor else {})}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.done = int(state_dict["done"])
        self.losses.load(state_dict)
        if self.cursor is not None:
            self.cursor.load(state_dict)


class Run:
    """One worker's part in a run. Made by `holdfast.join`."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        plan: ShardPlan,
        loader: ShardLoader,
        exact: Exact,
        worker: Worker,
        feed: LedgerFeed,
        events: EventLog,
        loops: Loops,
        guard: Guard,
        name: str,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.name = name
        self.plan = plan
        self._loader = loader
        self._exact = exact
        self._worker = worker
        self._feed = feed
        self._events = events
        self._guard = guard
        self._closed = False
        self._pending: m.Compute | None = None
        self._target = 0
        self._end: dict[str, Any] | None = None  # where the last loop ended
        self._open_shard: int | None = None
        self._recorded: dict[str, dict[int, float]] = {}  # the metrics of the open shard
        self._current: Step | None = None
        self._loops = loops
        self._arrived: Snapshot | None = None  # the state that I came with, while I pass loops that were over before
        self._optimizer_parameters = check_optimizer(optimizer, exact)
        self._reporter = Reporter(events, worker.machine)
        self._pulse = worker.spending
        self._heart: Heartbeat | None = None
        self._watcher: Callable[[int, int, Shares], None] | None = None
        optimizer.register_step_pre_hook(self._check_optimizer_call)

    # ---- what a script asks

    @property
    def id(self) -> str:
        return self._worker.machine.me

    @property
    def workers(self) -> tuple[str, ...]:
        """The members of the current view."""
        view = self._worker.machine.view
        return view.members if view else ()

    @property
    def leader(self) -> bool:
        """True on one worker: for what should happen once, like printing or saving."""
        return bool(self.workers) and self.workers[0] == self.id

    @property
    def step(self) -> int:
        """The number of steps applied."""
        return self._worker.machine.next or 0

    def digest(self) -> str:
        """Of all parameters and buffers: the same on every worker, and in every run with the same settings."""
        return weights_digest(self.model)

    def epochs(self, count: int) -> Iterator[Step]:
        """Steps until `count` epochs are over."""
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise ConfigError(f"epochs({count!r})", hint="give a whole number of epochs")
        if self._loops.cursor is not None:
            return self._steps(0, epochs=count)
        return self.steps(count * self.plan.steps_per_epoch)

    def steps(self, count: int) -> Iterator[Step]:
        """Steps until the run has had `count` of them, whoever did the earlier ones."""
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise ConfigError(f"steps({count!r})", hint="give a whole number of steps")
        return self._steps(count)

    def beat_in(self, run_dir: Path, started: int) -> None:
        """Let the agent see from now on whether this worker gets on."""
        try:
            self._heart = Heartbeat(self._pulse, run_dir, self.id, started=started)
        except OSError as error:
            self._events.write("warning", text=f"no heartbeats, so a hang will not be noticed: {error}")

    def watch(self, watcher: Callable[[int, int, Shares], None]) -> None:
        """Call it after every step that is applied, with the step, the view's number and whose shards counted.

        For drills. Whose shards counted is empty where this worker was sent the result.
        """
        self._watcher = watcher

    # ---- the loop

    def _steps(self, count: int, *, epochs: int | None = None) -> Iterator[Step]:
        self._pulse.adopt()
        self._pulse.enter(Activity.WAITING, self.step)
        self._target = max(self._target, count)
        self._settle()  # a step of a loop that was left with `break`
        if self._arrived is not None:
            # What the script does between two loops was done before this state was taken: not a second time.
            self._worker.go_back_to(self._arrived)
            self._arrived = None
        try:
            while True:
                directive = self._pending or self._worker.due() or self._worker.advance()
                self._pending = None
                assert isinstance(directive, m.Compute), directive
                if self._loops.passed < self._loops.done or self._is_over(directive.step, count, epochs):
                    self._pending = directive
                    self._worker.wait_for_joiners()
                    self._finish(directive.step)
                    return
                self._end = None
                step = self._current = Step(self, directive)
                self._pulse.enter(Activity.SCRIPT, step.number)
                try:
                    yield step
                except GeneratorExit:
                    step._left = True
                    raise
                self._pulse.enter(Activity.WAITING, step.number)
                self._settle()
        finally:
            self._pulse.enter(Activity.ENDED, self.step)
            self._loops.passed += 1
            if self._loops.passed <= self._loops.done:
                self._arrived = self._worker.hold(self.step)
            self._loops.done = max(self._loops.done, self._loops.passed)

    def _is_over(self, step: int, count: int, epochs: int | None) -> bool:
        """Whether the loop over steps is. An elastic run does not know beforehand how many an epoch has."""
        cursor = self._loops.cursor
        if cursor is None:
            return step >= count
        cursor.begin(step)
        if epochs is None:
            return step >= count
        more = (epochs - 1 - cursor.epoch) * self.plan.steps_per_epoch
        self._target = step + cursor.steps_left + more if cursor.epoch < epochs else step
        return cursor.epoch >= epochs

    def _settle(self) -> None:
        """The user's lines for the step are done, and it counts as applied."""
        step = self._current
        if step is None:
            return
        step._check_complete()
        self._current = None
        self._loops.losses.applied(step.metrics, skipped=step.skipped)
        if self._loops.cursor is not None:
            self._loops.cursor.used(step._shards)
        self._exact.rebase()
        self._worker.tell(m.Applied(step.number))
        self._reporter.applied(step.number + 1, self._target, step.metrics, step.samples)
        if self._watcher is not None:
            view, counted = self._worker.machine.view, self._worker.gradients.counted
            self._watcher(step.number, view.number if view else 0, counted.get(step.number, ()))

    def _finish(self, step: int) -> None:
        self._end = self._position(step)
        self._worker.save_last(step)
        self._events.write("reached", **self._end)

    def _position(self, step: int) -> dict[str, Any]:
        view = self._worker.machine.view
        return {"step": step, "digest": self.digest(), "view": view.number if view else 0}

    def _expect(self, step: int) -> None:
        """Tell the loader which shards come next, as long as the view holds."""
        machine = self._worker.machine
        mine = machine.shares.get(machine.me, ())
        cursor = self._loops.cursor
        if cursor is not None:
            self._loader.expect(cursor.upcoming(machine.assigned, mine, machine.room, max(1, self._target - step)))
            return

        def upcoming() -> Iterator[tuple[int, int]]:
            for shard in machine.assigned:
                yield step, shard
            number = step + 1
            while number < self._target:
                for shard in mine if number not in self._worker.rewinding.passed else ():
                    yield number, shard
                number += 1

        self._loader.expect(upcoming())

    def _check_optimizer_call(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self._open_shard is not None:
            raise ConfigError(
                "optimizer.step() was called inside the loop over a step's shards",
                hint="move it one level out: after `for x, y in step:` has ended, .grad is the mean over all shards",
            )
        if self._current is not None:
            self._current._check_complete()
            if self._current.skipped:
                self._exact.clear_gradients()  # also of what the script has added to them, such as a penalty on weights
            if not self._exact.has_gradients and any(p.grad is not None for p in self._exact.parameters):
                raise ConfigError(
                    "the gradients do not come from the loop over the step's shards, so they are only this worker's",
                    hint="call backward inside `for batch in step:`, shard by shard; do not collect the shards first",
                )
        if sum(len(group["params"]) for group in optimizer.param_groups) != self._optimizer_parameters:
            self._optimizer_parameters = check_optimizer(optimizer, self._exact)

    # ---- the end

    def close(self, *, failed: bool = False) -> None:
        """Leave the run. Called when the script ends; calling it again does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._heart is not None:
            self._heart.close()
        self._loader.close()
        step = self._current
        if step is not None and step._complete and step._left:
            self._end = self._position(step.number + 1)  # the script stopped early, with `break`
        if self._end is not None and not failed:
            self._worker.settle()
            self._events.write("finished", **self._end)
            self._feed.put(KEY_DONE, encode_json(self._end))
        self._worker.close()
        self._feed.close()
        self._pulse.tell()
        self._events.close()


class Step:
    """One update of the model. Iterate over it for this worker's shards; there may be none."""

    def __init__(self, run: Run, directive: m.Compute) -> None:
        self._run = run
        self._directive = directive if not run._worker.has_closed(directive.step) else None
        self._begun = False
        self._complete = False
        self.skipped = False  # its update is not applied: every .grad is None when the loop over the shards has ended
        self._left = False  # the loop over steps was left in this one
        self.number = directive.step
        cursor = run._loops.cursor
        self._places = cursor.places() if cursor is not None else None
        self._shards: tuple[int, ...] = ()  # elastic: those that are in the mean
        self.epoch = run.plan.epoch_of(directive.step) if cursor is None else cursor.epoch
        self._ends_epoch = (self.number + 1) % run.plan.steps_per_epoch == 0 if cursor is None else cursor.ends_epoch()
        self.samples = 0  # that the mean is over, once the loop over the shards has ended
        self.metrics: Mapping[str, float] = {}

    @property
    def ends_epoch(self) -> bool:
        """In elastic mode known for certain when the loop over the shards has ended: some may be lost."""
        return self._ends_epoch

    def record(self, **metrics: float | torch.Tensor) -> None:
        """Metrics of the shard at hand. `step.metrics` has their means over all shards once the loop has ended."""
        shard = self._run._open_shard
        if shard is None:
            raise ConfigError(
                "step.record was called outside the loop over the step's shards",
                hint="call it inside `for batch in step:`; afterwards step.metrics has the means over all shards",
            )
        for name, value in metrics.items():
            number = float(value.detach()) if isinstance(value, torch.Tensor) else float(value)
            self._run._recorded.setdefault(name, {})[shard] = number

    def __iter__(self) -> Iterator[Any]:
        run = self._run
        worker = run._worker
        if self._begun:
            raise ConfigError(
                f"the shards of step {self.number} were asked for twice",
                hint="go through them once: `for batch in step:`; a second pass over the same data is another step",
            )
        self._begun = True
        while True:
            run._pulse.enter(Activity.WAITING, self.number)
            directive: m.Compute | m.Commit
            missed = worker.missed(self.number)
            if missed is not None:
                directive = m.Commit(self.number, received=True)
            elif self._directive is not None:
                directive, self._directive = self._directive, None
            else:
                directive = worker.advance()
            if isinstance(directive, m.Commit):
                self._load(missed)
                run._pulse.enter(Activity.SCRIPT, self.number)
                return
            worker.begin(self.number)
            durations_s: list[float] = []
            shards = self._there(directive.shards) if self.number not in worker.rewinding.passed else ()
            if shards:
                run._expect(self.number)
            counted = set(shards)
            for shard in (*shards, *self._there(worker.audits.missing(directive, worker.rewinding.passed))):
                began = time.perf_counter()
                with worker.away(self.number):
                    run._pulse.enter(Activity.LOADING, self.number)
                    place = (self.number, shard) if self._places is None else self._places[shard]
                    batch = run._loader.get(*place)
                    run._pulse.enter(Activity.SHARD, self.number)
                    run._exact.before_shard()
                    seed_everything(derive_seed(run.plan.seed, *place))
                    run._open_shard, run._recorded = shard, {}
                    try:
                        yield batch
                    finally:
                        run._open_shard = None
                    run._pulse.enter(Activity.WAITING, self.number)
                late = worker.has_closed(self.number)
                sums = worker.gradients.sums if shard in counted else None
                collector = worker.audits.collector(shard, sums, run._recorded) if not late else NOWHERE
                run._exact.after_shard(shard, collector)
                if shard in counted:
                    durations_s.append(time.perf_counter() - began)
                if late:
                    worker.too_late(durations_s)
                    break
                if shard in counted:
                    worker.gradients.record(run._recorded)
            else:
                worker.computed(self.number, durations_s)

    def _there(self, shards: tuple[int, ...]) -> tuple[int, ...]:
        """At the end of an elastic epoch a step has fewer shards than were handed out."""
        return shards if self._places is None else tuple(shard for shard in shards if shard < len(self._places))

    def _load(self, missed: Kept | None) -> None:
        run = self._run
        began = time.monotonic()
        kept = run._worker.loaded(self.number, run._guard.inspect, missed)
        run._pulse.took(REDUCING, began)
        run._pulse.reduced_bytes += kept.memory.nbytes
        self.samples = run.plan.batch if self.number not in run._worker.rewinding.passed else 0
        if kept.shards is not None and run._loops.cursor is not None:
            self._shards = kept.shards
            self.samples = len(kept.shards) * run.plan.samples_per_shard
            self._ends_epoch = run._loops.cursor.ends_epoch(kept.shards)
        self.metrics = dict(kept.metrics) if self.number not in run._worker.rewinding.passed else _Unknown()
        seed_everything(derive_seed(run.plan.seed, self.number, "apply"))
        self._complete = True
        try:
            self.skipped = run._guard.judge(kept)
        except Evicted:
            self._complete = False  # the run goes back: a script that ends here has not finished
            raise

    def _check_complete(self) -> None:
        if not self._complete:
            raise ConfigError(
                f"the loop over the shards of step {self.number} was left early",
                hint="write `for batch in step:` without a break; every shard counts",
            )


class _Unknown(dict[str, float]):
    """The metrics of a step that nobody computed: a script may print any of them."""

    def __missing__(self, name: str) -> float:
        return float("nan")


def check_optimizer(optimizer: torch.optim.Optimizer, exact: Exact) -> int:
    """How many parameters it trains. All must be the model's: the gradients of others are not reduced."""
    known = {id(parameter) for parameter in exact.parameters}
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    strangers = sum(id(parameter) not in known for parameter in trained)
    if strangers:
        raise ConfigError(
            f"the optimizer trains {strangers} of {len(trained)} parameters that are not in the model given to join",
            hint="give join one module with everything that is trained, such as nn.ModuleList([encoder, head])",
        )
    return len(trained)
