"""A worker that is a group of ranks: each adds up its own plane in its own time, and may fail where the others do not.

What the machine is told of that is decided by the function that ships (membership/planes.py). The books know what each
rank has really added up.
"""

from __future__ import annotations

from typing import Any

from holdfast.membership import messages as m
from holdfast.membership import planes
from holdfast.membership.planes import Reduction
from tests.harness.simulator.schedule import Violation
from tests.harness.simulator.worker import Worker

TORN = 0.02  # so often a rank finds that a peer's rank has moved on, which the other planes do not see


class GroupWorker(Worker):
    """See the module."""

    def __init__(self, *place: Any) -> None:
        super().__init__(*place)
        self.planes = [(0, -1)] * self.world.schedule.ranks  # (view, step) that each rank has added up

    def _reduce(self, effect: m.Reduce) -> None:
        number, outcomes = self.world.books.number_of(self), dict[int, Reduction]()
        for rank in range(len(self.planes)):
            self._add_up(rank, number, effect, outcomes)

        def then() -> m.Event | None:
            if len(outcomes) < len(self.planes):
                self.work(0.002, then, blocked=True)
                return None
            event = planes.reduced_in_all([outcomes[rank] for rank in sorted(outcomes)])
            if isinstance(event, m.Reduced):
                self.world.books.check_reduction(effect)
                self.weights.add(effect)
            self.reduced = min(self.planes)
            return event

        self.work(0.001, then, blocked=True)

    def _add_up(self, rank: int, number: int, effect: m.Reduce, outcomes: dict[int, Reduction]) -> None:
        def then() -> None:
            books, rng = self.world.books, self.world.rng
            if not self.alive:
                return
            if self.stopped:
                self.world.after(0.05, then)
                return
            others = [member for member, _ in effect.shards if member != self.id]
            who = books.moved_on(number, effect) or books.broke_off(self, number, effect)
            if not who and others and rng.random() < TORN:
                who = rng.choice(others)
                books.disturbed()
                self.world.torn += 1
            if who:
                outcomes[rank] = Reduction(effect.step, who, "it has moved on")
                return
            self.planes[rank] = (number, effect.step)
            outcomes[rank] = Reduction(effect.step)

        self.world.after(self.world.rng.uniform(0.0, 0.02), then)

    def _commit(self, effect: m.Commit) -> None:
        at = (self.world.books.number_of(self), effect.step)
        behind = [rank for rank, plane in enumerate(self.planes) if plane != at]
        if behind and not effect.received:
            raise Violation(f"{self.id} commits step {effect.step}, which its ranks {behind} have not added up")
        super()._commit(effect)
