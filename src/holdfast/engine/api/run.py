"""What the user's script holds: a Run with its steps, and a Step with its shards.

The two `for`s of the user's loop are where failures are absorbed. A Step hands out this worker's shards; when they are
done it reduces, and if a peer died meanwhile it hands out that peer's shards too. When the inner loop ends, `.grad` is
the mean over all shards, on every worker with the same bits.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from holdfast.core.errors import ConfigError
from holdfast.core.words import KEY_DONE, encode_json
from holdfast.detection.beat import Activity
from holdfast.detection.heartbeat import Heartbeat
from holdfast.engine.api.alone import LoopSignals
from holdfast.engine.api.ending import Ending
from holdfast.engine.api.inputs import count_trained
from holdfast.engine.api.outside import Outside
from holdfast.engine.api.position import Position
from holdfast.engine.api.records import Best
from holdfast.engine.api.script_place import ScriptPlace
from holdfast.engine.api.step import Step
from holdfast.engine.between_loops import Turn
from holdfast.engine.gradients import Shares
from holdfast.engine.loops import NOT_LEFT, Loops
from holdfast.engine.steps import StepEngine, StepState
from holdfast.engine.worker import Worker
from holdfast.modes.capture import GradientCapture
from holdfast.modes.watching import check_closure
from holdfast.state.digest import weights_digest
from holdfast.state.optimizer import Optimizers, by_name


class Run:
    """One worker's part in a run. Made by `holdfast.join`."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizers,
        engine: StepEngine,
        *,
        worker: Worker,
        capture: GradientCapture,
        loops: Loops,
        name: str,
        **validated: Any,
    ) -> None:
        """`validated`: what an evaluation needs besides the model; see outside.py."""
        self.model = model
        self.optimizer: Any = optimizer  # as it was given to join: one, or several by name
        self.name = name
        self.plan = engine.plan
        self.engine = engine
        self._capture = capture
        self._worker = worker
        self._feed = worker.lines.feed
        self._events = events = worker.lines.events
        self._closed = False
        self._ending = Ending(worker, events, loops)
        self._signals = LoopSignals(worker.mailbox if not name else None)
        self._loops = loops
        self._trained = {one: count_trained(one, capture.parameters, name) for name, one in by_name(optimizer).items()}
        self._pulse = worker.spending
        worker.recorded = loops.records.at
        self._position = position = Position(engine, worker, loops)
        self._outside = Outside(position, loops.records, worker, events, plan=self.plan, **validated)
        engine.wishes, engine.collectives = self._outside, self._outside.collectives
        self._heart: Heartbeat | None = None
        self._hooks: list[Any] = []
        worker.audits.calls.watch(
            self._trained,
            in_shard=lambda: engine.open is not None,
            applies=lambda: engine.current is not None and engine.current.complete,
            late_gradients=capture.backward_watch.late_gradients,
        )
        for one in self._trained:
            self._hooks.append(one.register_step_pre_hook(self._check_optimizer_call))
            self._hooks.append(one.register_step_post_hook(self._note_optimizer_call))

    # ---- what a script asks

    @property
    def id(self) -> str:
        return self._worker.machine.me

    @property
    def workers(self) -> tuple[str, ...]:
        """The members of the current view; where every worker is by itself, all that are there."""
        view = self._worker.machine.view
        return self._worker.attendance.workers(view.members if view else ())

    @property
    def leader(self) -> bool:
        """True on one worker: for what should happen once, like printing or saving."""
        return bool(self.workers) and self.workers[0] == self.id and self._worker.rank == 0

    @property
    def step(self) -> int:
        """The number of steps applied."""
        return self._worker.machine.next or 0

    def digest(self) -> str:
        """Of all parameters and buffers: the same on every worker, and in every run with the same settings."""
        return weights_digest(self.model)

    # ---- what a script does outside the shards, on every worker at the same place: see outside.py

    def record(self, **metrics: Any) -> Mapping[str, float]:
        """Metrics of the run as it is now, such as a validation loss. Call it on every worker; the first one's value
        is everybody's. A function in place of a value is called on the first worker only."""
        return self._outside.record(metrics)

    def evaluate(
        self,
        dataset: Any,
        fn: Callable[[Any], Mapping[str, Any]],
        *,
        batch_size: int | None = None,
        prefix: str | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> dict[str, float]:
        """The means of what `fn(batch)` returns over the dataset: spread over the workers, the same bits for any
        number of them. With `prefix` they are recorded, under their names with that in front."""
        return self._outside.evaluate(dataset, fn, batch_size=batch_size, prefix=prefix, collate_fn=collate_fn)

    def stop(self, reason: str = "the script has asked for it") -> None:
        """End the loops over steps, on every worker after the same step: this one, where all of them call it."""
        self._outside.stop(reason)

    def gather(self, value: Any) -> list[Any]:
        """Every worker's value, in the order of `run.workers`. How many there are is no part of an exact run."""
        return self._outside.gather(value)

    @property
    def stopped(self) -> str:
        """Why the script has ended the training with `run.stop`; empty: it has not, or only after a step to come."""
        current = self.engine.current
        return self._loops.records.stops_before(self.step if current is None else current.number + current.complete)

    @property
    def metrics(self) -> Mapping[str, float]:
        """The newest values given to `run.record`. They travel with the state."""
        return self._loops.records.newest

    def best(self, criterion: str) -> Best:
        """Of what was recorded: run.best("val_loss:min") has the value, its step, and how many came `since`."""
        return self._loops.records.best(criterion)

    # ---- steps

    def epochs(self, count: int) -> Iterator[Step]:
        """Steps until `count` epochs are over."""
        if not isinstance(count, int) or isinstance(count, bool) or count < 0:
            raise ConfigError(f"epochs({count!r})", hint="give a whole number of epochs")
        first = self._loops.data.first_step(count)
        return self._steps(0, epochs=count) if first is None else self._steps(first)

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
        self.engine.watcher = watcher

    def arrive(self) -> None:
        """For whoever drives the loop: have the run's state already, before the first step is asked for."""
        self._position.arrive()

    def finish(self) -> None:
        """For whoever drives the engine itself: there will be no further steps. What is due is saved."""
        self._finish(self.engine.next_step(), passes=False)

    # ---- the loop

    def _steps(self, count: int, *, epochs: int | None = None) -> Iterator[Step]:
        goal = count if epochs is None else epochs
        self._ending.enter_loop(ScriptPlace(sys._getframe()), goal)
        self._pulse.adopt()
        self._pulse.enter(Activity.WAITING, self.step)
        engine = self.engine
        engine.until = max(engine.until, count)
        between, loops = self._worker.between_loops, self._loops.count
        self._ending.raise_what_waits()
        self._settle()  # a step of a loop that was left with an exception
        if self._ending.goes_on():
            between.left(loops, self.step)
        between.begin()
        self._signals.catch()
        try:
            while True:
                number = engine.next_step()
                left = not loops.is_passing and self._loops.is_left(goal, number)
                over = left or (not loops.is_passing and self._is_over(number, count, epochs))
                turn = loops.turn(over=over)
                if turn is Turn.STEP and engine.stops_here():
                    turn = loops.turn(over=self._loops.is_left(goal, number))
                if turn is Turn.AHEAD:
                    self._worker.replace_me("its script has been through a loop that the run's state has not")
                if turn is not Turn.STEP:
                    engine.finish_tables()
                    self._finish(number, passes=turn is Turn.PASS)
                    engine.seed(number, "end")
                    return
                self._ending.at, self._loops.left = None, NOT_LEFT
                step = Step(engine, engine.begin())
                try:
                    yield step
                except GeneratorExit:
                    self._ending.leave_loop(ScriptPlace(sys._getframe()), self._leave_early, goal)
                    raise
                self._settle()
        finally:
            self._signals.restore()
            self._pulse.enter(Activity.ENDED, self.step)
            if self._ending.cut is None:
                between.left(loops, self.step)

    def _leave_early(self) -> None:
        """The script has left the loop with `break`: its end is here."""
        step = self.engine.current
        if step is not None and not step.begun:
            self.engine.drop()
        elif step is not None:
            if step.complete and not step.updated and not step.skipped:
                left = f"the loop was left in step {step.number} before optimizer.step()"
                self._events.write("warning", text=f"{left}: its update is not in the model")
            self._settle()
        number = self.engine.next_step()
        self._finish(number, passes=False)
        self.engine.seed(number, "end")

    def _is_over(self, step: int, count: int, epochs: int | None) -> bool:
        """Whether the loop over steps is. `epochs`: where it is not known beforehand how many steps they have."""
        self._loops.data.begin(step)
        if epochs is None:
            return step >= count and self._loops.data.is_over(count)
        left = self._loops.data.steps_left(step, epochs)
        self.engine.until = step + left
        return not left

    def _settle(self) -> None:
        """The user's lines for the step are done, and it counts as applied."""
        if self.engine.current is not None:
            self.engine.applied()

    def _finish(self, step: int, *, passes: bool) -> None:
        """A loop is over. One that was over before this worker came is not its own to save or to report."""
        if passes:  # who came by a checkpoint has the state that others read, and the lines that follow change it
            self._worker.between_loops.let_them_read()
        else:
            self._worker.between_loops.end(step)
        self._ending.at = self._place(step)
        if not passes:
            self._events.write("reached", **self._ending.at)

    def _place(self, step: int) -> dict[str, Any]:
        view = self._worker.machine.view
        return {"step": step, "digest": self.digest(), "view": view.number if view else 0}

    def _check_optimizer_call(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        check_closure(args[1:], kwargs)
        step = self.engine.current
        if step is not None:
            step.check_complete()
            if step.skipped:
                self._capture.clear_gradients()  # also of what the script has added, such as a penalty on weights
            if not self._capture.has_gradients and any(p.grad is not None for p in self._capture.parameters):
                raise ConfigError(
                    "the gradients do not come from the loop over the step's shards, so they are only this worker's",
                    hint="call backward inside `for batch in step:`, shard by shard; do not collect the shards first",
                )
        if sum(len(group["params"]) for group in optimizer.param_groups) != self._trained[optimizer]:
            self._trained[optimizer] = count_trained(optimizer, self._capture.parameters)
        if step is not None:
            step.torn = True
            self._worker.attendance.updates(optimizer)

    def _note_optimizer_call(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        step = self.engine.current
        if step is not None:
            step.torn, step.updated = False, True

    # ---- the end

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def is_between_loops(self) -> bool:
        """Whether a loop over steps has come to its end, and no other has begun."""
        return self._ending.at is not None

    def close(self, *, failed: bool = False, at_exit: bool = False) -> None:
        """Leave the run. Called when the script ends; calling it again does nothing.

        WorkerEnded if its last state is not saved, or not the training's last.
        """
        if self._closed:
            return
        self._closed = True
        if self._heart is not None:
            self._heart.close()
        self.engine.close()
        for hook in self._hooks:
            hook.remove()
        try:
            if self.engine.current is not None and not failed and not self._worker.is_over:
                self._end_in_the_middle(self.engine.current, at_exit=at_exit)
            if self._worker.is_over:
                self._ending.at = None  # it has left between two loops: where the last one ended is not the end
            self._ending.conclude(failed=failed)
            if self._ending.at is not None and not failed:
                self._outside.look_back()
                self._events.write("finished", **self._ending.at)
                self._feed.put_at_last(KEY_DONE, encode_json(self._ending.at))
        finally:
            self.engine.over = True
            self._worker.close()
            self._feed.close()
            self._pulse.tell()
            self._events.close()

    def _end_in_the_middle(self, step: StepState, *, at_exit: bool) -> None:
        """The script ends, and its loop over steps had not: in this step it was left, or it never came back to it."""
        whole = step.complete and not step.torn
        if whole:
            self._settle()
        number = step.number + whole
        if self._ending.in_the_middle(number, whole=whole, torn=step.torn, at_exit=at_exit):
            self._ending.at = self._place(number)
        else:
            self._ending.cut_short(number, self.engine.until, at_exit=at_exit)
