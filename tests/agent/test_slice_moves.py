"""Where slices should be: a pure decision."""

from __future__ import annotations

from collections import Counter

from holdfast.agent.servers.moving import decide
from holdfast.log.configuration import Configuration
from holdfast.servers.placing import Target

HOSTS = {"s0.1": "a", "s1.1": "b", "s2.1": "c"}


def placed(*replicas: str) -> Configuration:
    return Configuration(1, replicas[0], replicas)


def test_a_slice_that_has_all_its_replicas_stays() -> None:
    slices = {"parameters/0": placed("s0.1", "s1.1", "s2.1")}
    assert decide(slices, {}, HOSTS, 3) == []


def test_the_replacement_of_a_lost_server_takes_its_place() -> None:
    slices = {"parameters/0": placed("s0.1", "s1.1", "s2.1")}
    hosts = {"s0.1": "a", "s1.1": "b", "s2.2": "c"}
    [move] = decide(slices, {}, hosts, 3)
    assert move.target == Target(("s0.1", "s1.1", "s2.2"))
    assert "s2.1 is gone" in move.reason


def test_a_lost_replica_goes_to_a_host_that_has_none_yet() -> None:
    slices = {"parameters/0": placed("s0.1@a", "s1.1@b")}
    hosts = {"s0.1@a": "a", "s2.1@a": "a", "s3.1@c": "c"}
    [move] = decide(slices, {}, hosts, 2)
    assert set(move.target.replicas) == {"s0.1@a", "s3.1@c"}


def test_nothing_is_decided_for_a_slice_that_nobody_has() -> None:
    assert decide({"parameters/0": placed("s0.1")}, {}, {"s1.1": "a"}, 1) == []


def test_slices_move_one_at_a_time_to_a_server_that_joins_until_it_is_even() -> None:
    slices = {f"parameters/{number}": placed("s0.1") for number in range(4)}
    hosts, moved = {"s0.1": "a", "s1.1": "b"}, 0
    while moves := decide(slices, {}, hosts, 1):
        [move] = moves
        slices[move.slice] = placed(*move.target.replicas)
        moved += 1
        assert moved <= 4, "it never comes to an end"
    assert Counter(one.primary for one in slices.values()) == {"s0.1": 2, "s1.1": 2}


def test_slices_move_away_from_a_slow_server() -> None:
    slices = {"parameters/0": placed("s0.1")}
    [move] = decide(slices, {}, {"s0.1": "a", "s1.1": "b"}, 1, slow={"s0.1"})
    assert move.target == Target(("s1.1",))
    assert "slow" in move.reason


def test_no_slice_moves_while_another_is_on_its_way() -> None:
    slices = {f"parameters/{number}": placed("s0.1") for number in range(4)}
    targets = {"parameters/0": Target(("s1.1",))}
    assert decide(slices, targets, {"s0.1": "a", "s1.1": "b"}, 1) == []
