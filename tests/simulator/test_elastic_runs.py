"""The elastic mode under schedules of failures: members have the same weights, nothing counts twice; and mutants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from holdfast.membership import messages as m
from holdfast.membership.machine import Machine, Phase
from holdfast.membership.view_rules import Plan, Report
from holdfast.modes.elastic import Elastic
from holdfast.modes.elastic.rules import ElasticRules
from tests.harness.simulator import Violation, World, simulate

SEEDS = 200
ELASTIC: dict[str, Any] = {"step_rules": Elastic().rules()}
Patch = pytest.MonkeyPatch


def quorum(of: int) -> dict[str, Any]:
    return {"step_rules": Elastic(quorum=of).rules(), "stands_in": True}


def short_steps(world: World) -> int:
    """How many of the longest history's updates have fewer shards than a full step."""
    histories = [worker.weights.updates for worker in world.workers.values()]
    return sum(len(update) < world.schedule.shards for update in max(histories, key=len))


def test_no_schedule_breaks_a_promise() -> None:
    short = 0
    for seed in range(SEEDS):
        world = simulate(seed, **ELASTIC)
        short += short_steps(world) > 0
    assert short > SEEDS / 5  # steps did go on with what was there


def test_many_faults() -> None:
    short = 0
    for seed in range(12):
        world = simulate(seed, **ELASTIC, workers=4, shards=8, steps=40, faults=25)
        short += short_steps(world)
        assert world.done
    assert short > 60


def test_liars_are_named_in_this_mode_too() -> None:
    for seed in range(25):
        world = simulate(seed, **ELASTIC, workers=4, hosts=1, audit=True, lies=0.2, save_every=0)
        assert world.given_up or world.steps_committed == world.schedule.steps


def test_who_is_late_is_not_waited_for_and_has_the_same_weights() -> None:
    closed = 0
    for seed in range(100):
        world = simulate(seed, **quorum(2), workers=4)
        closed += world.books.closed
        assert world.done
    assert closed > 300


# ---- rules broken one at a time


class CommitsWithWhatItHasHeard(Machine):
    """Does not wait for everybody's word on what they bring: members would add different sets."""

    def _reduce_if_ready(self, now: float) -> list[m.Effect]:
        if self.phase is Phase.GATHERING and self.view is not None and len(self.view.members) > 2:
            ready = self._ready.setdefault(self.next or 0, {})
            missing = [member for member in self.view.members if member not in ready]
            if len(missing) == 1 and any(message.shards for message in ready.values()):
                ready[missing[0]] = m.Ready(self.next or 0, ())
        return super()._reduce_if_ready(now)


class BringsWhatItWasGiven(Machine):
    """Says that it brings the shards that it was handed, computed or not."""

    def _computed(self, event: m.Computed, now: float) -> list[m.Effect]:
        return super()._computed(m.Computed(event.step, event.save, event.saving, event.pace, event.said), now)


class ClosesForNothing(Machine):
    """Counts who has brought nothing among those that need not wait: a step may end up with no shards at all."""

    def closes(self) -> bool:
        return self.phase is Phase.COMPUTING and len(self._ready.get(self.next or 0, {})) >= 1


class GoesOnWithoutItsState(Machine):
    """Lets a stand-in go on where the state of its worker is needed."""

    needs_state = False  # type: ignore[assignment]


def compute_again(patch: Patch) -> None:
    """Who is left takes over the shards of the lost, and those that others hold."""

    def taken_over(rules: ElasticRules, plan: Plan, reports: dict[str, Report], shards: int) -> Plan:
        thin = real(rules, plan, reports, shards)
        return Plan(plan.step, dict.fromkeys(thin.assignment, tuple(range(shards))), plan.gives, plan.fetches)

    real = ElasticRules.settle
    patch.setattr(ElasticRules, "settle", taken_over)


def begin_anew(patch: Patch) -> None:
    """After a loss the step is handed out again, whatever is held."""

    def anew(rules: ElasticRules, plan: Plan, reports: dict[str, Report], shards: int) -> Plan:
        return real(rules, plan, {one: Report(said.next, size=said.size) for one, said in reports.items()}, shards)

    real = ElasticRules.settle
    patch.setattr(ElasticRules, "settle", anew)


@pytest.mark.parametrize("mutant", [CommitsWithWhatItHasHeard, BringsWhatItWasGiven])
def test_a_broken_machine_is_caught(mutant: type[Machine]) -> None:
    with pytest.raises(Violation):
        for seed in range(SEEDS):
            simulate(seed, **ELASTIC, machine_class=mutant)


@pytest.mark.parametrize("mutate", [compute_again, begin_anew], ids=lambda mutate: mutate.__name__)
def test_a_broken_rule_is_caught(mutate: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutate(monkeypatch)
    with pytest.raises(Violation):
        for seed in range(SEEDS):
            simulate(seed, **ELASTIC)


@pytest.mark.parametrize("mutant", [ClosesForNothing, GoesOnWithoutItsState])
def test_a_broken_quorum_is_caught(mutant: type[Machine]) -> None:
    with pytest.raises(Violation):
        for seed in range(SEEDS):
            simulate(seed, **quorum(1), workers=4, machine_class=mutant)
