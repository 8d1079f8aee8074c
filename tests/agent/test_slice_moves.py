"""Where slices should be: a pure decision."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

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


def test_the_slices_of_a_server_that_leaves_move_though_it_has_the_only_copy() -> None:
    slices = {"parameters/0": placed("s0.1")}
    [move] = decide(slices, {}, {"s0.1": "a", "s1.1": "b"}, 1, leaving={"s0.1"})
    assert move.target == Target(("s1.1",))
    assert "s0.1 leaves" in move.reason
    assert decide(slices, {}, {"s0.1": "a"}, 1, leaving={"s0.1"}) == [], "nobody could have it"


def test_a_slice_that_is_on_one_host_moves_to_another_that_joins() -> None:
    slices = {"parameters/0": placed("s0.1@a", "s1.1@a", "s2.1@a")}
    hosts = {"s0.1@a": "a", "s1.1@a": "a", "s2.1@a": "a", "s0.1@b": "b"}
    [move] = decide(slices, {}, hosts, 3)
    assert "s0.1@a" in move.target.replicas, "its primary stays"
    assert "s0.1@b" in move.target.replicas and len(move.target.replicas) == 3
    assert "a has 3 copies of it and b none" in move.reason


def test_a_slow_server_leads_nothing_and_stays_a_replica_where_there_is_no_other() -> None:
    slices = {"parameters/0": placed("s0.1", "s1.1", "s2.1"), "parameters/1": placed("s1.1", "s2.1", "s0.1")}
    [move] = decide(slices, {}, HOSTS, 3, slow={"s0.1"})
    assert move.slice == "parameters/0"
    assert move.target == Target(("s0.1", "s1.1", "s2.1"), "s2.1"), "to the one that leads the least"
    assert move.reason == "s0.1 is slow; s2.1 leads instead"
    targets = {"parameters/0": move.target}
    assert decide(slices, targets, HOSTS, 3, slow={"s0.1"}) == [], "it is on its way"
    slices["parameters/0"] = Configuration(2, "s2.1", ("s0.1", "s1.1", "s2.1"))
    assert decide(slices, targets, HOSTS, 3, slow={"s0.1"}) == []


def test_primaries_are_spread_when_all_slices_are_where_they_should_be() -> None:
    slices = {f"parameters/{number}": placed("s0.1", "s1.1", "s2.1") for number in range(3)}
    [move] = decide(slices, {}, HOSTS, 3)
    assert move.target == Target(("s0.1", "s1.1", "s2.1"), "s1.1")
    assert "s0.1 leads 3 slices and s1.1 0" in move.reason


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_whatever_comes_and_goes_it_comes_to_rest_with_copies_on_as_many_hosts_as_can_be(data: st.DataObject) -> None:
    names = [f"s{number}.1@{host}" for host in "abc" for number in range(data.draw(st.integers(0, 3)))]
    if not names:
        return
    hosts = {name: name.partition("@")[2] for name in names}
    replicas = data.draw(st.integers(1, 3))
    servers = st.lists(st.sampled_from(names), min_size=1, max_size=3, unique=True)
    slices = {f"parameters/{number}": placed(*data.draw(servers)) for number in range(data.draw(st.integers(1, 5)))}
    slow = set(data.draw(st.lists(st.sampled_from(names), max_size=1)))
    leaving = set(data.draw(st.lists(st.sampled_from(names), max_size=1))) - slow
    targets: dict[str, Target] = {}
    for _ in range(200):
        moves = decide(slices, targets, hosts, replicas, leaving=leaving, slow=slow)
        if not moves:
            break
        for move in moves:
            primary = slices[move.slice].primary
            leads = move.target.primary or (primary if primary in move.target.replicas else move.target.replicas[0])
            epoch = slices[move.slice].epoch + 1
            targets[move.slice] = move.target
            slices[move.slice] = Configuration(epoch, leads, move.target.replicas)
    else:
        raise AssertionError("it never comes to an end")
    staying = {server: host for server, host in hosts.items() if server not in leaving}
    for configuration in slices.values():
        if not staying:
            continue
        assert set(configuration.replicas) <= staying.keys()
        assert len(configuration.replicas) >= min(replicas, len(staying))
        used = Counter(staying[server] for server in configuration.replicas)
        free = {host for server, host in staying.items() if server not in slow} - used.keys()
        assert max(used.values()) == 1 or not free, "two copies on a host while another has none"
