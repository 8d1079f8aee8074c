"""Do shards follow the workers' paces, and stay where they are when there is little to gain?"""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.membership import balance
from holdfast.membership.balance import (
    GAIN_MIN,
    GAIN_S_MIN,
    IDLE_DECAY,
    SLOW_AFTER_S,
    WARM_UP_STEPS,
    Pace,
    Slowness,
    divide,
    expected_s,
    fill_in,
    rebalanced,
)
from holdfast.membership.step_rules import StepRules

MEMBERS = ("w0.1", "w1.1", "w2.1", "w3.1")
paces = st.lists(st.floats(0.001, 100.0), min_size=1, max_size=9)


def even(shards: int, members: tuple[str, ...] = MEMBERS) -> dict[str, tuple[int, ...]]:
    return divide(shards, members, dict.fromkeys(members, 1.0))


@given(st.integers(1, 100), paces)
def test_every_shard_once_in_contiguous_ranges(shards: int, found: list[float]) -> None:
    members = [f"w{slot}.1" for slot in range(len(found))]
    shares = divide(shards, members, dict(zip(members, found, strict=True)))
    assert sorted(shard for mine in shares.values() for shard in mine) == list(range(shards))
    assert all(list(mine) == list(range(mine[0], mine[0] + len(mine))) for mine in shares.values() if mine)


@given(st.integers(1, 60), paces)
def test_no_single_shard_could_be_better_placed(shards: int, found: list[float]) -> None:
    members = [f"w{slot}.1" for slot in range(len(found))]
    known = dict(zip(members, found, strict=True))
    shares = divide(shards, members, known)
    slowest = max(members, key=lambda member: len(shares[member]) * known[member])
    finish = len(shares[slowest]) * known[slowest]
    for member in members:
        if member != slowest:
            assert (len(shares[member]) + 1) * known[member] >= finish * (1 - 1e-9)


def test_a_slow_worker_gets_fewer() -> None:
    known = {**dict.fromkeys(MEMBERS, 1.0), "w1.1": 5.0}
    better = rebalanced(even(32), 32, known)
    assert better is not None and len(better["w1.1"]) == 2
    assert expected_s(better, known) == 10.0  # 32 shards for 3.2 workers' worth
    assert rebalanced(better, 32, known) is None


@given(st.lists(st.floats(0.95, 1.05), min_size=4, max_size=4))
def test_noise_moves_nothing(found: list[float]) -> None:
    assert rebalanced(even(32), 32, dict(zip(MEMBERS, found, strict=True))) is None


def test_what_is_gained_is_worth_it() -> None:
    known = {**dict.fromkeys(MEMBERS, 1.0), "w1.1": 1.0 / (1 - GAIN_MIN) + 0.01}
    better = rebalanced(even(400), 400, known)
    assert better is None or expected_s(better, known) <= (1 - GAIN_MIN) * expected_s(even(400), known)


def test_without_any_pace_nothing_is_known() -> None:
    assert rebalanced(even(8), 8, dict.fromkeys(MEMBERS, 0.0)) is None


def test_a_newcomer_is_taken_for_average() -> None:
    assert fill_in({"a": 1.0, "b": 3.0, "c": 0.0}) == {"a": 1.0, "b": 3.0, "c": 2.0}


def test_workers_of_a_host_stay_side_by_side() -> None:
    members = ("w0.1@b", "w0.1@a", "w1.1@b", "w1.1@a")
    shares = divide(8, members, dict.fromkeys(members, 1.0))
    assert list(shares) == ["w0.1@b", "w1.1@b", "w0.1@a", "w1.1@a"]


def warm() -> Pace:
    pace = Pace()
    assert [pace.took([100.0]) for _ in range(WARM_UP_STEPS)] == [0.0] * WARM_UP_STEPS, "first steps say nothing"
    return pace


def test_milliseconds_are_not_worth_it() -> None:
    assert rebalanced(even(4), 4, {**dict.fromkeys(MEMBERS, GAIN_S_MIN / 100), "w1.1": 0.99 * GAIN_S_MIN}) is None


def test_one_slow_shard_is_no_pace() -> None:
    pace = warm()
    assert pace.took([0.1, 0.1, 2.0, 0.1]) == 0.1
    assert pace.took([0.1, 0.1, 0.1]) == 0.1


def test_a_change_is_believed_within_a_few_steps() -> None:
    pace = warm()
    pace.took([0.1] * 4)
    found = [pace.took([0.5] * 4) for _ in range(8)]
    assert found == sorted(found) and 0.45 < found[-1] < 0.5


def test_an_idle_worker_is_tried_again() -> None:
    pace = warm()
    pace.took([5.0])
    assert pace.took([]) == pytest.approx(5.0 * IDLE_DECAY)


def test_paces_that_waver_move_nothing_for_a_long_time() -> None:
    """Each step a shard takes up to a fifth more or less: what is moved then is moved back again soon."""
    rng = random.Random(7)
    found = {member: warm() for member in MEMBERS}
    shares, moved = even(32), 0
    for _ in range(1000):
        paces = {member: found[member].took([rng.uniform(0.8, 1.2) for _ in range(8)]) for member in MEMBERS}
        better = rebalanced(shares, 32, paces)
        shares, moved = better or shares, moved + (better is not None)
    assert moved <= 2


def test_without_hysteresis_they_would(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balance, "GAIN_MIN", 0.0)
    with pytest.raises(AssertionError):
        test_paces_that_waver_move_nothing_for_a_long_time()


def test_many_workers_are_divided_quickly() -> None:
    members = [f"w{slot}.1" for slot in range(1000)]
    paces = {member: 1.0 + slot % 7 for slot, member in enumerate(members)}
    shares = divide(8000, members, paces)
    assert sum(map(len, shares.values())) == 8000
    assert max(len(shares[member]) * paces[member] for member in members) < 1.3 * 8000 / sum(
        1 / pace for pace in paces.values()
    )


def test_who_is_slow_is_told_once_with_what_it_costs() -> None:
    slowness = Slowness()
    quick, slow = dict.fromkeys(MEMBERS, 0.1), {**dict.fromkeys(MEMBERS, 0.1), "w3.1": 0.5}
    assert slowness.look(quick, 0.0) == ([], [])
    assert slowness.look(slow, 10.0) == ([], []), "not yet: it may be a moment's"
    ((found,), over) = slowness.look(slow, 10.0 + SLOW_AFTER_S)
    assert (found.worker, found.times, found.since_s) == ("w3.1", 5.0, SLOW_AFTER_S) and not over
    assert found.costs == pytest.approx(0.2), "0.8 of one of four"
    assert slowness.look(slow, 100.0) == ([], [])
    assert slowness.look(quick, 101.0) == ([], ["w3.1"])
    assert slowness.look(quick, 102.0) == ([], [])


def test_a_spell_that_ends_is_not_told() -> None:
    slowness = Slowness()
    slow = {**dict.fromkeys(MEMBERS, 0.1), "w3.1": 0.5}
    slowness.look(slow, 0.0)
    slowness.look(dict.fromkeys(MEMBERS, 0.1), SLOW_AFTER_S - 1)
    assert slowness.look(slow, SLOW_AFTER_S) == ([], [])


def test_who_has_left_is_not_said_to_be_quick_again() -> None:
    slowness = Slowness()
    slow = {**dict.fromkeys(MEMBERS, 0.1), "w3.1": 0.5}
    slowness.look(slow, 0.0)
    assert slowness.look(slow, SLOW_AFTER_S)[0]
    assert slowness.look(dict.fromkeys(MEMBERS[:3], 0.1), 20.0) == ([], [])


def test_with_even_rules_shards_stay_where_they_are() -> None:
    """`--rebalance off`: every worker keeps as many, however slow one is."""
    paces = {**dict.fromkeys(MEMBERS, 1.0), "w3.1": 5.0}
    rules, kept = StepRules(), even(16)
    assert rules.rebalanced(kept, 16, paces) is not None
    assert len(rules.shares(16, MEMBERS, paces)["w3.1"]) == 1
    rules.even = True
    assert rules.rebalanced(kept, 16, paces) is None
    assert rules.shares(16, MEMBERS, paces) == kept
    assert not StepRules.even, "that is this run's, and no other's"
