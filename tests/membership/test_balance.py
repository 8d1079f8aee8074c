"""Do shards follow the workers' paces, and stay where they are when there is little to gain?"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.membership.balance import GAIN_MIN, IDLE_DECAY, Pace, divide, expected_s, fill_in, rebalanced

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


def test_one_slow_shard_is_no_pace() -> None:
    pace = Pace()
    assert pace.took([0.1, 0.1, 2.0, 0.1]) == 0.1
    assert pace.took([0.1, 0.1, 0.1]) == 0.1


def test_a_change_is_believed_within_a_few_steps() -> None:
    pace = Pace()
    pace.took([0.1] * 4)
    found = [pace.took([0.5] * 4) for _ in range(8)]
    assert found == sorted(found) and 0.45 < found[-1] < 0.5


def test_an_idle_worker_is_tried_again() -> None:
    pace = Pace()
    pace.took([5.0])
    assert pace.took([]) == pytest.approx(5.0 * IDLE_DECAY)
