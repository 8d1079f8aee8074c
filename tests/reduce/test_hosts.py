"""Workers on several hosts: shared memory within each, one stream between any two, the same bits as adding by hand."""

from __future__ import annotations

import math
import os
import random
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.membership.view_rules import assign
from holdfast.net.groups import BrokenGroup, Group
from holdfast.reduce import network
from holdfast.reduce.hosts import by_host

from .crews import STEP, WAIT_S, Crew, on_hosts, tcp_pair

LAYOUTS = [(1, 1), (2, 2), (1, 3), (3, 1, 2), (1, 1, 1, 1), (2, 1, 2, 1)]
MIXED = ("w0.1@b", "w0.1@a", "w1.1@b", "w0.1@c", "w1.1@a")  # members of a view stand in the order in which they came
CREWS_MAX = 8  # of up to 60 open files each, where a process may have 1024


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a few thousand numbers are many blocks."""
    monkeypatch.setattr(network, "BLOCK_BYTES", 1024)


def received(crew: Crew, member: str, peer: str) -> int:
    """Bytes from a peer that nobody has read: at a leader all were, and nobody else was sent any."""
    try:
        return len(crew.groups[member].connections[peer].sock.recv(1 << 20))
    except BlockingIOError:
        return 0


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("members", [*(on_hosts(*counts) for counts in LAYOUTS), MIXED], ids=lambda m: "-".join(m))
@pytest.mark.parametrize("shards", [1, 4, 7, 8])
@pytest.mark.parametrize("small", [True, False], ids=["small", "large"])
def test_all_layouts_give_the_bits_of_one_worker(members: tuple[str, ...], shards: int, small: bool) -> None:
    crew = Crew(members, shards, tcp_pair)
    paths, before = crew.hosts(small=small), crew.slots()
    crew.check(crew.reduce(paths))
    crew.check(crew.reduce(paths))  # again, on the same sums: they were left whole
    assert all(torch.equal(a, b) for a, b in zip(before, crew.slots(), strict=True))
    crew.close()


def test_bulk_data_moves_between_leaders_only() -> None:
    crew = Crew(MIXED, 8, tcp_pair)
    paths = crew.hosts(small=False)
    leaders = {"w0.1@b", "w0.1@a", "w0.1@c"}
    assert {member for member, path in paths.items() if path.bulk} == leaders
    assert all(paths[leader].bulk == leaders - {leader} for leader in leaders)
    crew.check(crew.reduce(paths))
    assert not any(received(crew, member, peer) for member in MIXED for peer in MIXED if peer != member)
    crew.close()


@pytest.fixture(scope="module")
def crews() -> Iterator[dict[tuple[tuple[str, ...], int], tuple[Crew, Iterator[int]]]]:
    """A few, by layout and shards, with the steps to come. Connections are as good as new after a reduction."""
    made: dict[tuple[tuple[str, ...], int], tuple[Crew, Iterator[int]]] = {}
    yield made
    for crew, _ in made.values():
        crew.close()


@settings(max_examples=1000)
@given(
    st.sampled_from([*(on_hosts(*counts) for counts in LAYOUTS), MIXED, on_hosts(4), on_hosts(1, 4), on_hosts(3, 3)]),
    st.sampled_from([1, 2, 3, 5, 8, 13]),
    st.booleans(),
    st.sampled_from([512, 4096, 1 << 20]),
    st.randoms(use_true_random=False),
)
def test_any_spread_of_the_shards_gives_the_bits_of_the_tree(
    crews: dict[tuple[tuple[str, ...], int], tuple[Crew, Iterator[int]]],
    members: tuple[str, ...],
    shards: int,
    small: bool,
    block_bytes: int,
    rng: random.Random,
) -> None:
    """Scattered as after a failure, members and whole hosts without any: never another order of additions."""
    if (members, shards) not in crews:
        if len(crews) == CREWS_MAX:
            crews.pop(next(iter(crews)))[0].close()
        crews[members, shards] = Crew(members, shards, socket.socketpair), count(STEP + 1)
    crew, steps = crews[members, shards]
    able = rng.sample(members, rng.randint(1, len(members)))
    assignment: dict[str, list[int]] = {member: [] for member in members}
    for shard in rng.sample(range(shards), shards):
        assignment[rng.choice(able)].append(shard)
    step = next(steps)
    crew.compute(step, assignment)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(network, "BLOCK_BYTES", block_bytes)
        crew.check(crew.reduce(crew.hosts(small=small), step))


def test_a_neighbour_that_went_on_is_noticed_before_anyone_can_use_its_sums() -> None:
    crew = Crew(on_hosts(2, 1), 4, tcp_pair)
    paths = crew.hosts(small=False)
    brought = crew.brought()
    crew.arenas["w1.1@a"].set_stamp(2, STEP)  # in another view by now
    with ThreadPoolExecutor(2) as pool:
        slept = pool.submit(paths["w0.1@a"].reduce, STEP, crew.layout, crew.members, brought)
        other = pool.submit(paths["w0.1@b"].reduce, STEP, crew.layout, crew.members, brought)
        with pytest.raises(BrokenGroup, match=r"lost w1\.1@a: it has moved on"):
            slept.result(WAIT_S)
        other.result(WAIT_S)  # it waits for a Done that never comes
    crew.close()


def test_a_neighbour_without_shared_memory_is_lost() -> None:
    crew = Crew(on_hosts(2, 1), 4, tcp_pair)
    crew.groups["w0.1@a"].connections["w1.1@a"].memory = None
    path = crew.hosts(small=False)["w0.1@a"]
    with pytest.raises(BrokenGroup, match=r"lost w1\.1@a: it did not share its memory"):
        path.reduce(STEP, crew.layout, crew.members, crew.brought())
    crew.close()


def test_a_mean_in_the_leaders_memory_outlives_the_leader_and_ends_with_the_next_reduction() -> None:
    crew = Crew(on_hosts(2, 2), 4, tcp_pair)
    paths = crew.hosts(small=False)
    kept = crew.reduce(paths)
    for leader in ("w0.1@a", "w0.1@b"):  # both hosts' leaders are gone: nobody has their memory but its readers
        crew.groups[leader].close()
    for member in ("w1.1@a", "w1.1@b"):
        crew.groups[member].close()
    crew.arenas["w0.1@a"].set_stamp(2, STEP + 1)  # had it lived, it would be at the next step's sums
    followers = {member: kept[member] for member in ("w1.1@a", "w1.1@b")}
    crew.check(followers)
    crew.arenas["w0.1@a"].claim_result(2, STEP + 1)  # ... and would reduce them
    assert not kept["w1.1@a"][1]() and kept["w1.1@b"][1]()
    crew.close()


def test_who_does_not_lead_gives_its_own_result_area_back() -> None:
    crew = Crew(on_hosts(2, 1), 4, tcp_pair)
    paths, led = crew.hosts(small=False), crew.network(small=False)
    kept = crew.reduce(led)["w1.1@a"]  # as if it had been alone on its host: the mean is in its own memory
    crew.compute(STEP + 1, assign(4, crew.members))
    before = os.fstat(crew.arenas["w1.1@a"].fd).st_blocks
    assert kept[1]()
    crew.check(crew.reduce(paths, STEP + 1))
    assert not kept[1]()
    freed = os.fstat(crew.arenas["w1.1@a"].fd).st_blocks
    assert before - freed == crew.layout.slot_bytes // 512
    crew.check(crew.reduce(paths, STEP + 1))
    assert os.fstat(crew.arenas["w1.1@a"].fd).st_blocks == freed
    crew.close()


class Mortal:
    """Stands in for a leader's group: its worker dies when it is about to exchange for the n-th time."""

    def __init__(self, group: Group, exchanges: float) -> None:
        self._group, self._exchange, self._left = group, group.exchange, exchanges
        self.count = 0
        self.died_at = 0.0
        group.exchange = self  # type: ignore[method-assign, assignment]

    def __call__(self, *arguments: Any, **options: Any) -> None:
        if self.count == self._left:
            self.died_at = time.monotonic()
            self._group.close()
            raise BrokenGroup(self._group.me, "it is dead")
        self.count += 1
        self._exchange(*arguments, **options)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("victim", ["w0.1@a", "w0.1@b", "w0.1@c"])
@pytest.mark.parametrize("moment", [0.0, 0.3, 0.7, 1.0])
@pytest.mark.parametrize("small", [True, False], ids=["small", "large"])
def test_a_leader_that_dies_ends_the_exchange_of_all_others_at_once(victim: str, moment: float, small: bool) -> None:
    crew = Crew(on_hosts(2, 1, 2), 8, tcp_pair)
    paths, before, brought = crew.hosts(small=small), crew.slots(), crew.brought()
    whole = Mortal(crew.groups[victim], math.inf)
    crew.check(crew.reduce(paths))
    dying = Mortal(crew.groups[victim], round(moment * (whole.count - 1)))
    leaders = [members[0] for members in by_host(crew.members).values()]
    ended: dict[str, float] = {}

    def reduce(leader: str) -> str:
        try:
            paths[leader].reduce(STEP, crew.layout, crew.members, brought)
        except BrokenGroup as error:
            crew.groups[leader].close()  # as its owner does
            return error.peer
        finally:
            ended[leader] = time.monotonic()
        return ""

    with ThreadPoolExecutor(len(leaders)) as pool:
        jobs = {leader: pool.submit(reduce, leader) for leader in leaders}
        lost = {leader: job.result(WAIT_S) for leader, job in jobs.items()}
    others = [lost[leader] for leader in leaders if leader != victim]
    assert victim in others  # who was not talking to it learns from one that was
    assert all(others) or moment == 1.0, lost  # at the very end one may have all it needs: no Done will follow
    assert max(ended.values()) - dying.died_at < 0.2
    assert all(torch.equal(a, b) for a, b in zip(before, crew.slots(), strict=True))  # the sums are whole
    crew.close()
