"""A simulated worker whose processor is wrong now and then, with all other faults: is it named, and nobody else?"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from holdfast.membership import auditing
from holdfast.membership import messages as m
from holdfast.membership.auditing import Said
from tests.harness.simulator import Violation, World, simulate
from tests.harness.simulator.lying import Hardware

SEEDS = 120
Patch = pytest.MonkeyPatch


def run(seed: int, *, lies: float = 0.2) -> World:
    return simulate(seed, workers=4, hosts=1, audit=True, lies=lies, save_every=0)


def test_a_liar_is_named_and_nothing_wrong_is_committed() -> None:
    """Unless it is found when only two are left: then the run is given up, and only then."""
    lied = given_up = 0
    for seed in range(SEEDS):
        world = run(seed)
        lied += any(worker.hardware.has_lied for worker in world.workers.values())
        given_up += world.given_up
        assert world.given_up or world.steps_committed == world.schedule.steps
    assert lied > SEEDS / 3 and given_up < lied / 5


def test_audits_alone_disturb_nothing() -> None:
    for seed in range(SEEDS // 2):
        world = run(seed, lies=0.0)
        assert world.done and not world.given_up and world.steps_committed == world.schedule.steps


def test_with_more_workers_of_several_hosts() -> None:
    for seed in range(40):
        world = simulate(seed, workers=5, hosts=3, audit=True, lies=0.3, save_every=2)
        assert world.given_up or world.done


# ---- rules broken one at a time


def believe_the_minority(patch: Patch) -> None:
    def minority(digests: Mapping[str, str]) -> str:
        believed = real(digests)
        return next((digest for digest in digests.values() if digest != believed), "") if believed else ""

    real = auditing.majority
    patch.setattr(auditing, "majority", minority)


def believe_the_first(patch: Patch) -> None:
    patch.setattr(auditing, "majority", lambda digests: next(iter(digests.values())))


def count_an_audited_shard(patch: Patch) -> None:
    real = Hardware.computes

    def computes(self: Hardware, effect: m.Compute) -> Said:
        said = real(self, effect)
        self._values.update({shard: self._said[shard] for shard in effect.audits})
        return said

    patch.setattr(Hardware, "computes", computes)


def bring_an_audited_shard(patch: Patch) -> None:
    """It says in its Ready that it brings what it has only compared."""
    real = auditing.Auditing.extra

    def extra(self: auditing.Auditing, step: int, assignment: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        found = real(self, step, assignment)
        everything: dict[str, tuple[int, ...]] = assignment  # type: ignore[assignment]
        everything[self._me] = (*assignment.get(self._me, ()), *found)
        return found

    patch.setattr(auditing.Auditing, "extra", extra)


def go_on_with_the_liar(patch: Patch) -> None:
    """It is only written down."""
    patch.setattr(auditing.Auditing, "judge", lambda self, step, members, said: None)


MUTANTS: list[Callable[[Patch], None]] = [
    believe_the_minority,
    believe_the_first,
    count_an_audited_shard,
    bring_an_audited_shard,
    go_on_with_the_liar,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_broken_rule_is_caught(mutant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    mutant(monkeypatch)
    with pytest.raises(Violation):
        for seed in range(SEEDS):
            run(seed)
