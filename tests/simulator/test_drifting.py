"""States that have gone apart, and workers that join, with all other faults: is it told, once, and of the right one?"""

from __future__ import annotations

from collections import Counter

import pytest

from holdfast.membership import messages as m
from holdfast.membership.machine import Machine
from tests.harness.simulator import Violation, World, simulate
from tests.harness.simulator.drifting import FLIP, SCRIPT

SEEDS = 60


def run(seed: int, drifts: str, machine_class: type[Machine] = Machine) -> World:
    return simulate(
        seed,
        workers=4,
        hosts=1,
        steps=60,
        faults=10,
        fault="crash",
        drifts=drifts,
        save_every=0,
        rewinds=0,
        late=False,
        loops=(),
        machine_class=machine_class,
    )


def doubts(world: World) -> int:
    """How often somebody was offered states that differ."""
    return sum(worker.drift.doubts for worker in world.workers.values())


@pytest.mark.parametrize(("drifts", "verdicts"), [(SCRIPT, {"script"}), (FLIP, {"rewind", "corrupt"})])
def test_what_a_joiner_notices_is_told_at_once(drifts: str, verdicts: set[str]) -> None:
    """Only a joiner can notice here. Then the run ends with a verdict, unless those who differ are gone before they
    have compared; and nobody is offered two states again and again."""
    noticed: Counter[str] = Counter()
    for seed in range(SEEDS):
        world = run(seed, drifts)
        assert bool(world.verdict) <= bool(doubts(world)) and doubts(world) <= world.schedule.workers, seed
        noticed[world.verdict] += bool(doubts(world))
    found = sum(noticed[verdict] for verdict in verdicts)
    assert found >= SEEDS / 12 and set(noticed) <= {*verdicts, ""} and noticed[""] < found, noticed


class Evicting(Machine):
    """As it was: the joiner ends, and another comes in its place."""

    def _sources_differ(self, event: m.SourcesDiffer, now: float) -> list[m.Effect]:
        return self._be_evicted("the snapshot did not arrive")


def test_without_the_rule_one_joiner_after_the_other_is_replaced() -> None:
    with pytest.raises(Violation, match="views since the last fault, and no end"):
        for seed in range(SEEDS):
            run(seed, SCRIPT, Evicting)
