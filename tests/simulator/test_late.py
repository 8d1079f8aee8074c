"""Workers that pause: the others go on without them, and they come back. No promise is broken; mutants are noticed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from holdfast.core.words import View
from holdfast.membership import messages as m
from holdfast.membership import returning, view_rules
from holdfast.membership.late import still_late
from holdfast.membership.machine import Machine
from holdfast.membership.reach import Roll
from holdfast.membership.view_rules import Decision, LedgerState, Plan
from tests.harness.simulator import Schedule, Violation, World, simulate
from tests.harness.simulator.books import Books

SEEDS = 40
MUTANT_SEEDS = 600
Patch = pytest.MonkeyPatch

# Seeds of runs that fail if a bug that was once found comes back. 40, 152: one that was left behind is taken in at a
# step that its script has been through. 154: the state of long ago is taken for one to start over with.
# 1357: of those who are not late one has lost its lease, and fewer go on than are left behind.
REGRESSIONS = ((40, 6), (152, 6), (154, 0), (1357, 5))


def run(seed: int, *, faults: int = 0, machine_class: type[Machine] = Machine, **changes: Any) -> World:
    changes = {"steps": 25, "pauses": 5, "spares": 0, "hangs": 0, "rewinds": 0, "loops": (), **changes}
    return simulate(seed, late=True, faults=faults, machine_class=machine_class, **changes)


def test_who_pauses_is_left_behind_and_comes_back() -> None:
    left = back = 0
    for seed in range(SEEDS):
        world = run(seed)
        assert world.done and world.steps_committed == world.schedule.steps
        left += world.books.left_behind
        back += world.books.caught_up
    assert left > SEEDS / 4 and back > left / 4


def test_with_all_other_faults() -> None:
    assert sum(run(seed, faults=6).books.left_behind for seed in range(SEEDS)) > SEEDS / 20


def test_without_pauses_nobody_is_late() -> None:
    """Workers whose speeds differ, and vary, by what they always do."""
    for seed in range(SEEDS // 2):
        assert not run(seed, pauses=0).books.left_behind


def test_it_can_be_switched_off() -> None:
    worlds = [simulate(seed, late=False, steps=25, pauses=5, faults=0) for seed in range(SEEDS // 2)]
    assert not any(world.books.left_behind for world in worlds)


@pytest.mark.parametrize(("seed", "faults"), REGRESSIONS)
def test_what_once_failed(seed: int, faults: int) -> None:
    assert run(seed, faults=faults, spares=Schedule.draw(seed).spares if faults else 0).done


# ---- rules broken one at a time


class CountsLateShardsTwice(Machine):
    """The late one's Ready comes after all, and is counted beside its shards that the others have computed again."""

    def _heard(self, event: m.Heard, now: float) -> list[m.Effect]:
        message, view = event.message, self.view
        if isinstance(message, m.Ready) and view is not None and event.peer in dict(view.late):
            self.extra = {**getattr(self, "extra", {}), message.step: (event.peer, message.shards)}
        return super()._heard(event, now)

    def _reduce_if_ready(self, now: float) -> list[m.Effect]:
        extra = getattr(self, "extra", {})
        return [
            m.Reduce(effect.step, (*effect.shards, extra[effect.step]))
            if isinstance(effect, m.Reduce) and effect.step in extra
            else effect
            for effect in super()._reduce_if_ready(now)
        ]


class ComesBackWithoutFetching(Machine):
    """Goes on with the state that it had."""

    def _reconcile_if_complete(self, now: float) -> list[m.Effect]:
        left_at = self._left_at
        effects = super()._reconcile_if_complete(now)
        fetch = next((effect for effect in effects if isinstance(effect, m.Fetch)), None)
        return self._loaded(m.Loaded(fetch.step), now) if fetch is not None and left_at else effects


class KeepsTheMeanOfTheStepBefore(Machine):
    """And gives it to who asks for that of the step in which it was left behind."""

    def _keep_for_the_late(self, view: View, plan: Plan, before: int) -> list[m.Effect]:
        found = [m.Keep(plan.step, 30.0) for _ in super()._keep_for_the_late(view, plan, before)]
        self._keeps = frozenset()
        return [*found]


class GoesThroughAStepAgain(Machine):
    """Does not look whether the others are where it has been before."""

    def _has_passed(self, reports: Any) -> str:
        return ""


class TellsTooEarly(Machine):
    """Says that it is back as soon as it sees that it was left behind, still inside the step."""

    def _catch_up(self, now: float) -> list[m.Effect]:
        return [*self._publish(Roll(self._left_at), now), *super()._catch_up(now)]


class AppliesTheMeanAgain(Machine):
    """Hands the mean that it was given to the user's loop twice."""

    def _caught(self, event: m.Caught, now: float) -> list[m.Effect]:
        effects = super()._caught(event, now)
        return [*effects, *effects]


def take_in_who_is_not_back(patch: Patch) -> None:
    """A registration is enough."""
    patch.setattr(view_rules, "not_back", lambda ledger: frozenset())


def leave_the_many_behind(patch: Patch) -> None:
    """Who misses everybody takes everybody for late."""

    def propose_without(me: str, ledger: LedgerState, late: Sequence[str]) -> Decision:
        assert ledger.view is not None
        live = tuple(member for member in ledger.view.members if member in ledger.ids and member not in late)
        left = still_late(ledger, live, late)
        return Decision(View(ledger.view.number + 1, live, "all are late", left) if live[:1] == (me,) else None, "")

    patch.setattr(returning, "propose_without", propose_without)


MACHINES = [
    CountsLateShardsTwice,
    ComesBackWithoutFetching,
    KeepsTheMeanOfTheStepBefore,
    GoesThroughAStepAgain,
    TellsTooEarly,
    AppliesTheMeanAgain,
]


def first_violation(machine_class: type[Machine] = Machine, of: str = "") -> str:
    for seed in range(MUTANT_SEEDS):
        try:
            run(seed, faults=seed % 3, machine_class=machine_class)
        except Violation as violation:
            said = str(violation).splitlines()[0]
            if of in said:
                return said
    return ""


def test_late_shards_that_are_counted_twice_are_caught_by_the_books(monkeypatch: Patch) -> None:
    """Even where the stamps of the memory, which would tell first, are not looked at."""
    monkeypatch.setattr(Books, "moved_on", lambda self, number, effect: "")
    assert first_violation(CountsLateShardsTwice, "would be committed with shards")


@pytest.mark.parametrize("mutant", MACHINES, ids=lambda mutant: mutant.__name__)
def test_a_broken_machine_is_caught(mutant: type[Machine]) -> None:
    assert first_violation(mutant), f"{mutant.__name__} passed {MUTANT_SEEDS} schedules"


@pytest.mark.parametrize("patch", [take_in_who_is_not_back, leave_the_many_behind], ids=lambda patch: patch.__name__)
def test_a_broken_rule_is_caught(patch: Callable[[Patch], None], monkeypatch: Patch) -> None:
    patch(monkeypatch)
    assert first_violation(), f"{patch.__name__} passed {MUTANT_SEEDS} schedules"
