"""Both paths, real sockets and real shared memory between threads: the same bits as adding by hand."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from holdfast.core.words import View
from holdfast.membership import messages as m
from holdfast.membership.codec import encode
from holdfast.membership.view_rules import assign
from holdfast.reduce.arena import Arena
from holdfast.reduce.groups import BrokenGroup, Connection, Gone, Group, Said
from holdfast.reduce.layout import Layout
from holdfast.reduce.network import Network
from holdfast.reduce.reduction import Brought, bring
from holdfast.reduce.shared_memory import SharedMemory
from holdfast.reduce.sums import Sums
from holdfast.reduce.tree import Range, split

SHAPES = [(50, 41), (3,), (1000,), (7, 11)]
DTYPES = [torch.float32, torch.float32, torch.bfloat16, torch.float64]
Stream = Callable[[], tuple[socket.socket, socket.socket]]


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        right, _ = server.accept()
    return left, right


def groups(count: int, stream: Stream, arenas: list[Arena] | None = None) -> list[Group]:
    members = tuple(f"w{index}.1" for index in range(count))
    made = [Group(View(1, members), member) for member in members]
    for a in range(count):
        for b in range(a + 1, count):
            left, right = stream()
            for mine, other, sock in ((a, b, left), (b, a, right)):
                arena = (
                    Arena(os.dup(arenas[other].fd), arenas[other].slots, arenas[other].slot_bytes) if arenas else None
                )
                made[mine].add(Connection(members[other], sock, arena))
    return made


def gradients(shard: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(shard)
    return [
        (torch.randn(shape, generator=generator) * 3.0**shard).to(dtype)
        for shape, dtype in zip(SHAPES, DTYPES, strict=True)
    ]


def by_hand(node: Range) -> list[torch.Tensor]:
    if node[1] - node[0] == 1:
        return gradients(node[0])
    left, right = split(node)
    return [a + b for a, b in zip(by_hand(left), by_hand(right), strict=True)]


class Crew:
    """A few workers in threads, each with its arena, its sums and its end of the group."""

    def __init__(self, count: int, shards: int, stream: Stream) -> None:
        self.layout = Layout([torch.empty(shape, dtype=dtype) for shape, dtype in zip(SHAPES, DTYPES, strict=True)])
        self.members = tuple(f"w{index}.1" for index in range(count))
        self.arenas = [Arena.create(2 * shards, self.layout.slot_bytes) for _ in self.members]
        self.sums = [Sums(arena, shards, parities=2) for arena in self.arenas]
        self.groups = groups(count, stream, self.arenas)
        self.shards = shards
        assignment = assign(shards, self.members)
        for arena, sums, member in zip(self.arenas, self.sums, self.members, strict=True):
            arena.set_stamp(1, 4)
            sums.begin(4, self.layout)
            for shard in assignment[member]:
                sums.add(shard, gradients(shard), range(len(SHAPES)))

    def brought(self) -> dict[str, Brought]:
        return {member: bring(sums, {}) for member, sums in zip(self.members, self.sums, strict=True)}

    def reduce_all(self, paths: list[SharedMemory] | list[Network]) -> list[torch.Tensor]:
        brought = self.brought()
        with ThreadPoolExecutor(len(paths)) as pool:
            jobs = [pool.submit(path.reduce, 4, self.layout, self.members, brought) for path in paths]
            return [job.result(30)[0] for job in jobs]

    def check(self, memories: list[torch.Tensor]) -> None:
        right = [sum_ / self.shards for sum_ in by_hand((0, self.shards))]
        for memory in memories:
            for found, wanted in zip(self.layout.views(memory), right, strict=True):
                assert torch.equal(found, wanted)

    def close(self) -> None:
        for group in self.groups:
            group.close()
        for arena in self.arenas:
            arena.close()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("shards", [1, 4, 7, 8])
@pytest.mark.parametrize("two_rounds", [True, False])
def test_shared_memory(count: int, shards: int, two_rounds: bool) -> None:
    crew = Crew(count, shards, socket.socketpair)
    paths = []
    for group, arena in zip(crew.groups, crew.arenas, strict=True):
        arenas = {peer: connection.arena for peer, connection in group.connections.items() if connection.arena}
        paths.append(SharedMemory(group.view, group.me, shards, {**arenas, group.me: arena}, two_rounds=two_rounds))
    crew.check(crew.reduce_all(paths))
    crew.close()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("shards", [1, 4, 7, 8])
@pytest.mark.parametrize("small", [True, False])
def test_network(count: int, shards: int, small: bool) -> None:
    crew = Crew(count, shards, tcp_pair)
    paths = [
        Network(group, shards, arena, small=small, interrupted=lambda: "")
        for group, arena in zip(crew.groups, crew.arenas, strict=True)
    ]
    crew.check(crew.reduce_all(paths))
    before = [
        [vector.clone() for _, slot in sums.nodes() for vector in crew.layout.vectors(arena.slot(slot, crew.layout))]
        for arena, sums in zip(crew.arenas, crew.sums, strict=True)
    ]
    crew.check(crew.reduce_all(paths))  # again, on the same sums: they were left whole
    after = [
        [vector for _, slot in sums.nodes() for vector in crew.layout.vectors(arena.slot(slot, crew.layout))]
        for arena, sums in zip(crew.arenas, crew.sums, strict=True)
    ]
    assert all(
        torch.equal(a, b) for mine, yours in zip(before, after, strict=True) for a, b in zip(mine, yours, strict=True)
    )
    crew.close()


def test_a_worker_that_slept_notices_that_the_others_went_on() -> None:
    crew = Crew(2, 4, socket.socketpair)
    group = crew.groups[0]
    arenas = {peer: connection.arena for peer, connection in group.connections.items() if connection.arena}
    path = SharedMemory(group.view, group.me, 4, {**arenas, group.me: crew.arenas[0]}, two_rounds=True)
    brought = crew.brought()
    crew.arenas[1].set_stamp(2, 4)  # in another view by now
    with pytest.raises(BrokenGroup, match="moved on"):
        path.reduce(4, crew.layout, crew.members, brought)
    crew.close()


def test_a_peer_that_dies_in_the_middle_ends_the_exchange_at_once() -> None:
    one, two = groups(2, tcp_pair)
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
    one, two = groups(2, tcp_pair)
    with pytest.raises(BrokenGroup, match="its lease is gone"):
        one.exchange([], [("w1.1", [memoryview(bytearray(10))])], interrupted=lambda: "w1.1")
    one.close()
    two.close()


def test_frames_are_heard_in_order_and_a_closed_connection_at_the_end() -> None:
    one, two = groups(2, socket.socketpair)
    for step in range(100):
        one.broadcast(encode(m.Done(step)))
    one.close()
    heard: list[Said | Gone] = []
    while not heard or not isinstance(heard[-1], Gone):
        heard += two.poll(5.0)
    assert [item.message for item in heard if isinstance(item, Said)] == [m.Done(step) for step in range(100)]
    two.close()


def test_what_follows_bulk_data_is_read_as_frames_again() -> None:
    one, two = groups(2, socket.socketpair)
    one.broadcast(encode(m.Result(3), {"bulk": 1}))
    one.exchange([("w1.1", [memoryview(b"x" * 100_000)])], [], interrupted=lambda: "")
    one.broadcast(encode(m.Done(9)))
    (said,) = two.poll(5.0)
    assert isinstance(said, Said) and said.message == m.Result(3)
    assert two.poll(0.05) == []  # bulk data is not taken for frames
    data = bytearray(100_000)
    two.exchange([], [("w0.1", [memoryview(data)])], interrupted=lambda: "")
    assert data == b"x" * 100_000
    more = two.resume("w0.1") or two.poll(5.0)
    assert [item.message for item in more if isinstance(item, Said)] == [m.Done(9)]
    one.close()
    two.close()


@pytest.mark.parametrize("garbage", [b"\xff" * 64, b"\x05\x00\x00\x00hello", b"\x02\x00\x00\x00{}", os.urandom(200)])
def test_garbage_costs_its_connection_and_nothing_else(garbage: bytes) -> None:
    one, two, three = groups(3, socket.socketpair)
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
