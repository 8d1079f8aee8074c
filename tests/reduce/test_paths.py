"""Both paths, real sockets and real shared memory between threads: the same bits as adding by hand."""

from __future__ import annotations

import os
import socket
import threading

import pytest
import torch

from holdfast.membership import messages as m
from holdfast.membership.codec import encode
from holdfast.net.groups import BrokenGroup, Gone, Said
from holdfast.reduce.hosts import Hosts
from holdfast.reduce.network import Network
from holdfast.reduce.paths import BY_ITSELF, check_coverage, make_path, takes_two_rounds
from holdfast.reduce.reduction import ReductionTerms
from holdfast.reduce.shared_memory import SharedMemory
from holdfast.reduce.tree import tree_over

from .crews import STEP, Crew, groups, on_hosts, one_host, tcp_pair


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("shards", [1, 4, 7, 8])
@pytest.mark.parametrize("two_rounds", [True, False])
def test_shared_memory(count: int, shards: int, two_rounds: bool) -> None:
    crew = Crew(one_host(count), shards, socket.socketpair)
    crew.check(crew.reduce(crew.shared_memory(two_rounds=two_rounds)))
    crew.close()


@pytest.mark.parametrize("shards", [1, 4, 7, 8])
def test_who_is_always_alone_has_the_mean_where_the_sum_was(shards: int) -> None:
    crew = Crew(one_host(1), shards, socket.socketpair)
    (member,), (arena,), (group,) = crew.members, crew.arenas.values(), crew.groups.values()
    path = make_path(BY_ITSELF, group, arena, crew.terms(small=False))
    used = os.fstat(arena.fd).st_blocks
    kept = crew.reduce({member: path})
    crew.check(kept)
    assert os.fstat(arena.fd).st_blocks == used  # it has taken no memory
    ((_, is_intact),) = kept.values()
    crew.compute(STEP + 1, {member: range(shards)})
    assert not is_intact()
    crew.check(crew.reduce({member: path}, STEP + 1))
    crew.close()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("shards", [1, 4, 7, 8])
@pytest.mark.parametrize("small", [True, False])
def test_network(count: int, shards: int, small: bool) -> None:
    crew = Crew(one_host(count), shards, tcp_pair)
    paths, before = crew.network(small=small), crew.slots()
    crew.check(crew.reduce(paths))
    crew.check(crew.reduce(paths))  # again, on the same sums: they were left whole
    assert all(torch.equal(a, b) for a, b in zip(before, crew.slots(), strict=True))
    crew.close()


@pytest.mark.parametrize("path", ["one round", "two rounds", "network"])
def test_a_kept_mean_is_whole_until_the_next_step_is_reduced_and_not_longer(path: str) -> None:
    crew = Crew(one_host(2), 4, tcp_pair)
    paths = crew.network(small=False) if path == "network" else crew.shared_memory(two_rounds=path == "two rounds")
    kept = crew.reduce(paths)
    crew.arenas["w0.1"].set_stamp(2, STEP + 1)  # a new view, the next step: its sums are begun, the mean is untouched
    crew.check(kept)
    crew.compute(STEP + 1, {"w0.1": (0, 1), "w1.1": (2, 3)})
    crew.check(kept)
    crew.check(crew.reduce(paths, STEP + 1))
    assert not any(is_intact() for _, is_intact in kept.values())
    crew.close()


@pytest.mark.parametrize("small", [True, False], ids=["small", "large"])
@pytest.mark.parametrize(
    ("kind", "members", "right"),
    [
        ("host", one_host(3), SharedMemory),
        ("hosts", on_hosts(2, 1), Hosts),
        ("hosts", on_hosts(3), SharedMemory),  # the others are gone: no network, but two rounds as before
        ("network", one_host(3), Network),
        ("network", on_hosts(2, 1), Network),
    ],
)
def test_the_kind_of_a_run_and_the_hosts_of_a_view_decide_the_path(
    kind: str, members: tuple[str, ...], right: type, small: bool
) -> None:
    crew = Crew(members, 4, tcp_pair)
    paths = {
        member: make_path(kind, group, crew.arenas[member], ReductionTerms(4, small))
        for member, group in crew.groups.items()
    }
    assert {type(path) for path in paths.values()} == {right}
    assert {path.two_rounds for path in paths.values()} == {takes_two_rounds(kind, small=small)}
    crew.check(crew.reduce(paths))
    crew.close()


def test_a_member_that_brings_other_nodes_than_its_shards_is_lost() -> None:
    crew = Crew(one_host(2), 4, socket.socketpair)
    brought = crew.brought()
    check_coverage(tree_over(4), [("w0.1", (0, 1)), ("w1.1", (2, 3))], brought)
    with pytest.raises(BrokenGroup, match=r"lost w1\.1: it brings \(\(2, 4\),\), not the shards \(1, 3\)"):
        check_coverage(tree_over(4), [("w0.1", (0, 1)), ("w1.1", (1, 3))], brought)
    crew.close()


def test_a_worker_that_slept_notices_that_the_others_went_on() -> None:
    crew = Crew(one_host(2), 4, socket.socketpair)
    path = crew.shared_memory(two_rounds=True)["w0.1"]
    crew.arenas["w1.1"].set_stamp(2, STEP)  # in another view by now
    with pytest.raises(BrokenGroup, match="moved on"):
        path.reduce(STEP, crew.layout, crew.members, crew.brought())
    crew.close()


def test_a_worker_that_wakes_while_it_adds_writes_into_its_own_memory_only() -> None:
    """It was stopped in the middle of a reduction, and the others have used their memory for something else since."""
    crew = Crew(one_host(3), 8, socket.socketpair)
    paths = crew.shared_memory(two_rounds=True)
    for arena in crew.arenas.values():
        arena.result(crew.layout).fill_(7)
    others = {member: arena.memory.clone() for member, arena in crew.arenas.items() if member != "w2.1"}
    paths["w2.1"].reduce(STEP, crew.layout, crew.members, crew.brought())
    assert (crew.arenas["w2.1"].result(crew.layout) != 7).any()  # it did write its slice
    assert all(torch.equal(crew.arenas[member].memory, memory) for member, memory in others.items())
    crew.close()


def test_a_result_in_parts_takes_the_memory_of_one() -> None:
    """Slices move when the crew changes; what a worker wrote for another one's view is given back."""
    crew = Crew(one_host(3), 8, socket.socketpair)
    crew.check(crew.reduce(crew.shared_memory(two_rounds=True)))
    used = sum(os.fstat(arena.fd).st_blocks for arena in crew.arenas.values())
    alone = crew.shared_memory(two_rounds=False)["w2.1"]  # for a while it needs the whole area for itself
    alone.reduce(STEP, crew.layout, crew.members, crew.brought())
    assert sum(os.fstat(arena.fd).st_blocks for arena in crew.arenas.values()) > used
    crew.check(crew.reduce(crew.shared_memory(two_rounds=True)))
    assert sum(os.fstat(arena.fd).st_blocks for arena in crew.arenas.values()) == used
    crew.close()


def test_a_peer_that_dies_in_the_middle_ends_the_exchange_at_once() -> None:
    one, two = groups(one_host(2), tcp_pair)
    big = memoryview(bytearray(50_000_000))

    def die() -> None:
        two.connections["w0.1"].sock.setblocking(True)
        two.connections["w0.1"].sock.recv(1_000_000)
        two.close()

    thread = threading.Thread(target=die)
    thread.start()
    with pytest.raises(BrokenGroup, match=r"w1\.1"):
        one.exchange([("w1.1", [big])], [("w1.1", [memoryview(bytearray(10))])], interrupted=lambda: "")
    thread.join()
    one.close()


def test_an_exchange_that_is_stuck_asks_whether_to_go_on() -> None:
    one, two = groups(one_host(2), tcp_pair)
    with pytest.raises(BrokenGroup, match="its lease is gone"):
        one.exchange([], [("w1.1", [memoryview(bytearray(10))])], interrupted=lambda: "w1.1")
    one.close()
    two.close()


def test_frames_are_heard_in_order_and_a_closed_connection_at_the_end() -> None:
    one, two = groups(one_host(2), socket.socketpair)
    for step in range(100):
        one.broadcast(encode(m.Done(step)))
    one.close()
    heard: list[Said | Gone] = []
    while not heard or not isinstance(heard[-1], Gone):
        heard += two.poll(5.0)
    assert [item.message for item in heard if isinstance(item, Said)] == [m.Done(step) for step in range(100)]
    two.close()


def test_what_follows_bulk_data_is_read_as_frames_again() -> None:
    one, two = groups(one_host(2), socket.socketpair)
    one.broadcast(encode(m.GivenMean(3), {"bulk": 1}))
    one.exchange([("w1.1", [memoryview(b"x" * 100_000)])], [], interrupted=lambda: "")
    one.broadcast(encode(m.Done(9)))
    (said,) = two.poll(5.0)
    assert isinstance(said, Said) and said.message == m.GivenMean(3)
    assert two.poll(0.05) == []  # bulk data is not taken for frames
    data = bytearray(100_000)
    two.exchange([], [("w0.1", [memoryview(data)])], interrupted=lambda: "")
    assert data == b"x" * 100_000
    more = two.resume("w0.1") or two.poll(5.0)
    assert [item.message for item in more if isinstance(item, Said)] == [m.Done(9)]
    one.close()
    two.close()


@pytest.mark.parametrize(
    "garbage",
    [b"\xff" * 64, b"\x05\x00\x00\x00hello", b"\x02\x00\x00\x00{}", os.urandom(200)],
    ids=["ones", "words", "json", "random"],
)
def test_garbage_costs_its_connection_and_nothing_else(garbage: bytes) -> None:
    one, two, three = groups(one_host(3), socket.socketpair)
    two.connections["w0.1"].sock.sendall(garbage)
    three.broadcast(encode(m.Done(1)))
    heard: list[Said | Gone] = []
    while len(heard) < 2:
        news = one.poll(0.5)
        heard += news
        if not news and len(heard) == 1:  # random bytes may announce a frame that is never finished
            break
    assert any(isinstance(item, Said) and item.peer == "w2.1" for item in heard)
    assert not any(isinstance(item, Said) and item.peer == "w1.1" for item in heard)
    for group in (one, two, three):
        group.close()
