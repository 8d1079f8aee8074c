"""A few workers in threads of this process, on one host or several: each with its arena, its sums, its connections."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import torch

from holdfast.core.words import View, host_of
from holdfast.membership.codec import decode
from holdfast.membership.view_rules import assign
from holdfast.net.groups import Connection, Group
from holdfast.reduce.aggregators import MEAN, Aggregator
from holdfast.reduce.arena import Arena
from holdfast.reduce.hosts import Hosts
from holdfast.reduce.layout import Layout
from holdfast.reduce.network import Network
from holdfast.reduce.paths import make_path
from holdfast.reduce.reduction import Brought, Path, ReductionTerms, bring
from holdfast.reduce.sums import Sums
from holdfast.reduce.tree import Range, split

SHAPES = [(50, 41), (3,), (1000,), (7, 11), (5, 3), (2, 9), (4, 4)]
DTYPES = [
    *(torch.float32, torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.complex64),
    torch.float16,
]
STEP = 4
WAIT_S = 30.0
Stream = Callable[[], tuple[socket.socket, socket.socket]]
Reduced = tuple[torch.Tensor, Callable[[], bool]]


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        right, _ = server.accept()
    return left, right


def one_host(count: int) -> tuple[str, ...]:
    return tuple(f"w{index}.1" for index in range(count))


def on_hosts(*counts: int) -> tuple[str, ...]:
    """So many workers on each host, host by host."""
    return tuple(f"w{index}.1@{'abcdefg'[host]}" for host, count in enumerate(counts) for index in range(count))


def groups(members: Sequence[str], stream: Stream, arenas: Mapping[str, Arena] | None = None) -> list[Group]:
    """Everyone connected with everyone. Members of one host have each other's arenas, if there are any."""
    made = {member: Group(View(1, tuple(members)), member, decode) for member in members}
    for position, a in enumerate(members):
        for b in members[position + 1 :]:
            near = arenas is not None and host_of(a) == host_of(b)
            for mine, other, sock in zip((a, b), (b, a), stream(), strict=True):
                arena = _twin(arenas[other]) if near and arenas is not None else None
                made[mine].add(Connection(other, sock, arena))
    return list(made.values())


def _twin(arena: Arena) -> Arena:
    return Arena(os.dup(arena.fd), arena.slots, arena.slot_bytes)


@cache
def gradients(shard: int) -> list[torch.Tensor]:
    """Numbers of very different sizes, so that another order of additions gives other bits."""
    generator = torch.Generator().manual_seed(shard)
    return [
        (torch.randn(shape, generator=generator) * 3.0 ** (shard % 9)).to(dtype)
        for shape, dtype in zip(SHAPES, DTYPES, strict=True)
    ]


def by_hand(node: Range) -> list[torch.Tensor]:
    if node[1] - node[0] == 1:
        return gradients(node[0])
    left, right = split(node)
    return [a + b for a, b in zip(by_hand(left), by_hand(right), strict=True)]


@cache
def mean_by_hand(shards: int) -> list[torch.Tensor]:
    return [
        sum_ / shards if sum_.dtype.is_floating_point or sum_.dtype.is_complex else sum_  # of integers it is the sum
        for sum_ in by_hand((0, shards))
    ]


class Crew:
    """Workers that have summed up their shards of one step, and can reduce it by any path."""

    def __init__(
        self,
        members: Sequence[str],
        shards: int,
        stream: Stream,
        assignment: Mapping[str, Sequence[int]] | None = None,
        *,
        tensors: Callable[[int], list[torch.Tensor]] = gradients,
        buffers: int = 0,
        aggregator: Aggregator = MEAN,
    ) -> None:
        """`tensors`: what a shard brings, of which the last few are `buffers`."""
        like = tensors(0)
        self.layout = Layout(like, len(like) - buffers)
        self.tensors = tensors
        self.aggregator = aggregator
        self.members = tuple(members)
        self.shards = shards
        self.arenas = {member: Arena.create(2 * shards, self.layout.slot_bytes) for member in members}
        by_shard = aggregator.by_shard
        self.sums = {member: Sums(self.arenas[member], shards, parities=2, by_shard=by_shard) for member in members}
        self.groups = dict(zip(members, groups(members, stream, self.arenas), strict=True))
        self.compute(STEP, assignment or assign(shards, self.members))

    def compute(self, step: int, assignment: Mapping[str, Sequence[int]]) -> None:
        for member in self.members:
            self.arenas[member].set_stamp(1, step)
            self.sums[member].begin(step, self.layout)
            for shard in assignment[member]:
                self.sums[member].add(shard, self.tensors(shard), range(len(self.layout.shapes)))

    def brought(self) -> dict[str, Brought]:
        return {member: bring(sums, {}) for member, sums in self.sums.items()}

    def slots(self) -> list[torch.Tensor]:
        """A copy of all sums."""
        return [
            vector.clone()
            for member, sums in self.sums.items()
            for _, slot in sums.nodes()
            for vector in self.layout.vectors(self.arenas[member].slot(slot, self.layout))
        ]

    def readable(self, member: str) -> dict[str, Arena]:
        """The arenas that this member has: its own, and those of its host as they came with its connections."""
        connections = self.groups[member].connections.items()
        return {member: self.arenas[member]} | {peer: one.memory for peer, one in connections if one.memory is not None}

    def terms(self, *, small: bool) -> ReductionTerms:
        return ReductionTerms(self.shards, small, aggregator=self.aggregator)

    def shared_memory(self, *, two_rounds: bool) -> dict[str, Path]:
        terms = self.terms(small=not two_rounds)
        return {member: make_path("host", group, self.arenas[member], terms) for member, group in self.groups.items()}

    def network(self, *, small: bool) -> dict[str, Path]:
        return {
            member: Network(group, self.arenas[member], self.terms(small=small))
            for member, group in self.groups.items()
        }

    def hosts(self, *, small: bool) -> dict[str, Path]:
        return {
            member: Hosts(group, self.readable(member), self.terms(small=small))
            for member, group in self.groups.items()
        }

    def reduce(self, paths: Mapping[str, Path], step: int = STEP) -> dict[str, Reduced]:
        """All members at once, each in a thread of its own."""
        brought = self.brought()
        with ThreadPoolExecutor(len(paths)) as pool:
            jobs = {
                member: pool.submit(path.reduce, step, self.layout, self.members, brought)
                for member, path in paths.items()
            }
            return {member: job.result(WAIT_S) for member, job in jobs.items()}

    def check(self, reduced: Mapping[str, Reduced]) -> None:
        """All have the mean, to the bit, and say that it is whole."""
        right = mean_by_hand(self.shards)
        for member, (memory, is_intact) in reduced.items():
            assert is_intact(), member
            for found, wanted in zip(self.layout.views(memory), right, strict=True):
                assert torch.equal(found, wanted), (member, found, wanted)

    def close(self) -> None:
        for group in self.groups.values():
            group.close()
        for arena in self.arenas.values():
            arena.close()
