"""A simulated worker that has a stand-in: it has the word while the training thread is in a shard.

Does what such a mode's attendance does (modes/port.py), in virtual time: closes steps that enough others have brought
shards to, puts their means by, and lets the training thread apply them when it is back.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from holdfast.membership import messages as m
from holdfast.membership.phases import STEP_PHASES
from tests.harness.simulator.schedule import Violation
from tests.harness.simulator.worker import Worker

BEHIND_MAX = 6


class LateWorker(Worker):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._at = 0  # the step of the training thread
        self._began = self._each_s = 0.0  # its shards of that step
        self._shards: tuple[int, ...] = ()
        self._in_shard = False
        self._acting = False
        self._adding = False  # the stand-in is in a reduction
        self._rests = False  # it has nothing to do until the training thread has been back
        self._closed = -1
        self._missed: deque[tuple[int, tuple[int, ...]]] = deque()  # step, shards of its mean
        self._pending: m.Compute | None = None

    @property
    def behind(self) -> int:
        return len(self._missed)

    def take(self, event: m.Event) -> None:
        super().take(event)
        if self.busy and self._in_shard:
            self._act()

    # ---- the training thread

    def _compute(self, effect: m.Compute) -> None:
        if self._acting:
            self._pending = effect
            return
        self._closed = min(self._closed, effect.step - 1)
        if self.state is None:
            self.world.books.check_origin(self, effect.step)
            self.state = effect.step
        if self.state != effect.step:
            raise Violation(f"{self.id} computes step {effect.step} with the weights of step {self.state}")
        self._stamp(effect.step)
        self._at, self._began = effect.step, self.world.now
        self._shards = self.weights.there(effect.shards)
        rng = self.world.rng
        self._each_s = self.speed * rng.uniform(0.5, 1.5) * (10.0 if rng.random() < 0.15 else 1.0)
        self._in_shard, self._rests = True, False
        self.work(0.001 + len(self._shards) * self._each_s, self._back)
        self._act()

    def _stamp(self, step: int) -> None:
        self.stamp = (self.world.books.number_of(self), step)
        oldest = step if self.world.schedule.two_rounds else step - 1
        self.computed = {one: shards for one, shards in self.computed.items() if one >= oldest}
        self.computed.setdefault(step, set())

    def _back(self) -> m.Event | None:
        """Out of the shards. If the step was closed meanwhile, the rest of them is dropped."""
        if self._adding:  # the stand-in has the word
            self.work(0.005, self._back, blocked=True)
            return None
        self._in_shard = False
        if self._at <= self._closed:
            self._catch_up()
            return None
        self.computed[self._at].update(self._shards)
        return self._brings(self._at)

    def _catch_up(self) -> None:
        """Apply what was missed, one after another; then be where the machine is."""
        if not self._missed:
            self.busy = False
            if self._pending is not None:
                effect, self._pending = self._pending, None
                self._compute(effect)
            return

        def then() -> m.Event | None:
            step, shards = self._missed.popleft()
            if self.state != step:
                raise Violation(f"{self.id} applies step {step} to a state that has had {self.state} steps")
            self.state = step + 1
            self.weights.apply(step, shards)
            self.world.books.check_same(self)
            self.world.books.applied(self, step)
            if self.state == self.world.schedule.steps:
                self.world.finish(self)
                return None
            if self.machine.next == step:  # the stand-in went no further
                return m.Applied(step)
            self._catch_up()
            return None

        self.work(self.world.rng.uniform(0.001, 0.02), then, blocked=True)

    # ---- its stand-in

    def _act(self) -> None:
        if self._acting or self._adding or self._rests:
            return
        self._acting = True
        while self._in_shard and self.alive and not (self.stopped or self.finished or self._adding):
            if self.inbox:
                for effect in self.machine.handle(self.inbox.popleft(), self.clock()):
                    self.world.trace(self.id, "has its stand-in do", effect)
                    self.perform(effect)
            elif self.machine.phase in STEP_PHASES and self.machine.closes():
                self._close()
            else:
                break
            self._rests = self._rests or self.machine.phase not in STEP_PHASES
            if self._rests:
                break
        self._acting = False

    def _close(self) -> None:
        step = self.machine.next
        assert step is not None
        self._closed = step
        self._pending = None
        if step == self._at:
            finished = int((self.world.now - self._began) / self._each_s)
            self.computed[step].update(self._shards[:finished])
        else:
            self._stamp(step)
        self.world.books.closed += 1
        self.inbox.appendleft(self._brings(step))

    def _brings(self, step: int) -> m.Computed:
        every = self.world.schedule.save_every
        due = bool(every) and (step + 1) % every == 0
        return m.Computed(step, due, self.saving, shards=tuple(sorted(self.computed[step])))

    def _reduce(self, effect: m.Reduce) -> None:
        if not self._acting:
            super()._reduce(effect)
            return
        self._adding = True
        number = self.world.books.number_of(self)

        def then() -> None:
            if not self.alive:
                return
            books = self.world.books
            stuck = books.stuck_on(self, effect)
            if self.stopped or (stuck and self.feed.is_registered(stuck)):
                self.world.after(0.1, then)
                return
            failed = books.moved_on(number, effect) or books.broke_off(self, number, effect) or stuck
            event: m.Event
            if failed:
                event = m.ReductionFailed(effect.step, failed, "it is gone")
            else:
                books.check_reduction(effect)
                self.reduced = (number, effect.step)
                self.weights.add(effect)
                event = m.Reduced(effect.step)
            self._adding = False
            self.inbox.appendleft(event)
            self._act()

        self.world.after(self.world.rng.uniform(0.0, 0.02), then)

    def _commit(self, effect: m.Commit) -> None:
        if not self._acting:
            super()._commit(effect)
            return
        self.world.books.check_commit(self, effect.step)
        self.result, self.serving = effect.step, None
        self._missed.append((effect.step, self.weights.mean_of(effect.step)))
        if self.machine.needs_state or self.behind >= BEHIND_MAX:
            self._rests = True
        else:
            self.inbox.appendleft(m.Applied(effect.step))

    def _serve(self, effect: m.Serve) -> None:
        if self.behind:
            raise Violation(f"{self.id} is to serve step {effect.step}, and is {self.behind} steps behind")
        super()._serve(effect)

    def _save(self, effect: m.Save) -> None:
        if self.behind:
            raise Violation(f"{self.id} is to save step {effect.step}, and is {self.behind} steps behind")
        super()._save(effect)
