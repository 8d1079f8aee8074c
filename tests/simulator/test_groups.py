"""Workers that are groups of ranks: a plane that fails commits nothing in any other. Mutants are noticed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from holdfast.membership import messages as m
from holdfast.membership import planes
from holdfast.membership.planes import Reduction
from tests.harness.simulator import Violation, World, simulate

SEEDS = 200
MUTANT_SEEDS = 200
ALIKE: dict[str, Any] = {"network": False, "hosts": 1, "late": False, "save_every": 0, "rewinds": 0}


def run(seed: int, ranks: int) -> World:
    return simulate(seed, ranks=ranks, **ALIKE)


@pytest.mark.parametrize("ranks", [2, 4])
def test_groups_keep_all_promises_while_planes_fail_and_workers_are_lost(ranks: int) -> None:
    torn = 0
    for seed in range(SEEDS):
        world = run(seed, ranks)
        assert world.done
        torn += world.torn
    assert torn > SEEDS / 10


def first_answers_for_all(outcomes: Sequence[Reduction]) -> m.Reduced | m.ReductionFailed:
    return REAL(outcomes[:1])


def last_answers_for_all(outcomes: Sequence[Reduction]) -> m.Reduced | m.ReductionFailed:
    return REAL(outcomes[-1:])


def most_answer_for_all(outcomes: Sequence[Reduction]) -> m.Reduced | m.ReductionFailed:
    well = [one for one in outcomes if not one.reason]
    return REAL(well if len(well) * 2 > len(outcomes) else outcomes)


REAL = planes.reduced_in_all


@pytest.mark.parametrize("mutant", [first_answers_for_all, last_answers_for_all, most_answer_for_all])
def test_a_group_that_commits_what_one_plane_has_not_is_caught(
    mutant: Callable[[Sequence[Reduction]], m.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planes, "reduced_in_all", mutant)
    with pytest.raises(Violation, match=r"have not added up|before all slices are there"):
        for seed in range(MUTANT_SEEDS):
            run(seed, 4)
