"""A robust rule over the shards of a step: every path, every cut and every member comes to the same bits."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch

from holdfast.byzantine import parse
from holdfast.byzantine.shard_rows import RobustShards, block_bytes
from holdfast.reduce.aggregators import Cut, Work
from holdfast.reduce.layout import Layout
from holdfast.reduce.reduction import Path, ReductionTerms
from tests.reduce.crews import STEP, Crew, on_hosts, one_host, tcp_pair

SHARDS = 9
F = 2
HOSTILE = (3, 7)
SIZE = 50_000  # of the largest gradient: several blocks of inner products
RULES = (
    *("median", "trimmed-mean", "meamed", "mda", "krum", "geometric-median", "centered-clipping", "caf"),
    *("nnm+trimmed-mean", "arc+nnm+median", "bucketing:2+median", "mean", "distinct+centered-clipping"),
)
BUFFERS = 3


@cache
def honest(shard: int) -> list[torch.Tensor]:
    """Gradients of three dtypes, then buffers: statistics of a far larger scale, a counter in parts, a flag."""
    made = torch.Generator().manual_seed(shard)
    return [
        torch.randn(SIZE, generator=made) + 1.0,
        (torch.randn(3000, generator=made) + 1.0).to(torch.bfloat16),
        (torch.randn(700, generator=made) + 1.0).to(torch.complex64),
        1e4 + 100.0 * torch.randn(500, generator=made),
        torch.tensor([7, 0, 1]),
        torch.tensor([True, False]),
    ]


@cache
def attacked(shard: int) -> list[torch.Tensor]:
    if shard not in HOSTILE:
        return honest(shard)
    gradients = [-4.0 * tensor for tensor in honest(shard)[:-BUFFERS]]
    return [*gradients, torch.full((500,), 1e9), torch.tensor([1 << 30, 1 << 30, 1]), torch.tensor([False, True])]


@cache
def with_nan(shard: int) -> list[torch.Tensor]:
    made = [tensor.clone() for tensor in honest(shard)]
    if shard == HOSTILE[0]:
        made[0][SIZE - 1] = math.nan  # in one member's columns only
    if shard == HOSTILE[1]:
        made[3][2] = math.inf
    return made


def paths(
    rule: str,
    tensors: Callable[[int], list[torch.Tensor]],
    shards: int = SHARDS,
    aggregator: RobustShards | None = None,
) -> list[tuple[Crew, dict[str, Path]]]:
    def crew(members: Sequence[str], stream: Callable[[], tuple[socket.socket, socket.socket]]) -> Crew:
        chosen = aggregator or RobustShards(parse(rule), F)
        return Crew(members, shards, stream, tensors=tensors, buffers=BUFFERS, aggregator=chosen)

    crews = [crew(one_host(count), socket.socketpair) for count in (1, 3, 4)]
    made = [(one, one.shared_memory(two_rounds=True)) for one in crews]
    small = crew(one_host(2), socket.socketpair)
    network, hosts = crew(one_host(3), tcp_pair), crew(on_hosts(2, 1, 2), tcp_pair)
    small_network = crew(one_host(2), tcp_pair)
    return [
        *made,
        (small, small.shared_memory(two_rounds=False)),
        (network, network.network(small=False)),
        (small_network, small_network.network(small=True)),
        (hosts, hosts.hosts(small=False)),
    ]


@cache
def all_alike(rule: str, tensors: Callable[[int], list[torch.Tensor]]) -> tuple[list[torch.Tensor], tuple[bool, ...]]:
    """What every member of every crew comes to."""
    first: tuple[list[torch.Tensor], tuple[bool, ...] | None] | None = None
    for crew, by_member in paths(rule, tensors):
        for member, (memory, is_intact) in crew.reduce(by_member).items():
            assert is_intact()
            found = [view.clone() for view in crew.layout.views(memory)], by_member[member].trusted()
            if first is None:
                first = found
            assert found[1] == first[1], (rule, member)
            for one, other in zip(found[0], first[0], strict=True):
                assert torch.equal(one, other), (rule, member)
        crew.close()
    assert first is not None and first[1] is not None
    return first[0], first[1]


@pytest.mark.parametrize("rule", RULES)
def test_any_cut_gives_the_same_bits_on_every_member(rule: str) -> None:
    all_alike(rule, attacked)


def test_the_blocks_are_several_and_shared() -> None:
    crew = Crew(one_host(1), 1, socket.socketpair, tensors=honest, buffers=BUFFERS)
    assert crew.layout.slot_bytes // block_bytes(crew.layout) >= 4
    crew.close()


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule not in ("mean", "krum")])
def test_hostile_shards_are_left_out_of_gradients_and_buffers(rule: str) -> None:
    value, trusted = all_alike(rule, attacked)
    clean = [torch.stack([honest(shard)[number] for shard in range(SHARDS)]) for number in range(3)]
    for found, right in zip(value[:3], clean, strict=True):
        right = right.to(torch.complex128 if right.is_complex() else torch.float64)
        spread = (right - right.mean(dim=0)).abs().square().sum(dim=1).mean().sqrt()
        assert (found.to(right.dtype) - right.mean(dim=0)).abs().square().sum().sqrt() < 1.5 * spread
    assert value[3].max() < 2e4
    assert value[4].tolist() == [7, 0, 1] and value[5].tolist() == [True, False]
    if "bucketing" not in rule:  # a bucket is left out with all that are in it
        assert not any(trusted[shard] for shard in HOSTILE)


@pytest.mark.parametrize("rule", ["trimmed-mean", "nnm+trimmed-mean", "mean", "centered-clipping"])
def test_a_number_that_one_member_alone_sees_to_be_nan_is_an_attack_for_all(rule: str) -> None:
    value, trusted = all_alike(rule, with_nan)
    assert all(bool(torch.isfinite(one).all()) for one in value[:4])
    assert not any(trusted[shard] for shard in HOSTILE)
    rows = [torch.cat([one.reshape(-1) for one in honest(shard)[:1]]) for shard in range(SHARDS)]
    assert value[0].isclose(torch.stack(rows).mean(dim=0), atol=4.0).all()


def test_a_selection_is_that_of_the_rule_alone() -> None:
    """Krum gives one shard's gradient: the one that it gives for the stacked rows."""
    value, _ = all_alike("krum", attacked)
    rows = [
        torch.cat(
            [
                one.to(torch.complex64).view(torch.float32) if one.is_complex() else one.float().reshape(-1)
                for one in attacked(shard)[:3]
            ]
        )
        for shard in range(SHARDS)
    ]
    chosen = parse("krum").aggregate(rows, F).trusted.index(True)
    assert torch.equal(value[0], attacked(chosen)[0]) and torch.equal(value[2], attacked(chosen)[2])


def test_more_that_is_not_finite_than_the_rule_stands_is_seen_as_that() -> None:
    """The training diverges: that is for whoever looks after it, and not to be hidden."""

    def diverged(shard: int) -> list[torch.Tensor]:
        return [*(tensor * math.nan for tensor in honest(shard)[:4]), *honest(shard)[4:]]

    for crew, by_member in paths("trimmed-mean", diverged):
        for memory, _ in crew.reduce(by_member).values():
            assert not torch.isfinite(crew.layout.views(memory)[0]).any()
        crew.close()


@pytest.mark.parametrize("rule", ["median", "trimmed-mean", "krum", "mean", "bucketing:2+median"])
@pytest.mark.parametrize("where", [0, 3])
def test_more_than_f_broken_shards_are_a_step_that_is_not_finite_however_many_are_left(rule: str, where: int) -> None:
    """In one number only, a gradient's or a buffer's; and six whole shards are enough for these rules without f."""

    def broken(shard: int) -> list[torch.Tensor]:
        made = [tensor.clone() for tensor in attacked(shard)]
        if shard in (0, 4, 8):
            made[where][1] = math.nan
        return made

    for crew, by_member in paths(rule, broken):
        for memory, _ in crew.reduce(by_member).values():
            views = crew.layout.views(memory)
            assert not any(torch.isfinite(one).any() for one in views[:3])
            assert views[4].tolist() == [7, 0, 1] and views[5].tolist() == [True, False]
        crew.close()


def test_an_honest_shard_that_ran_over_leaves_f_as_it_was() -> None:
    def ran_over(shard: int) -> list[torch.Tensor]:
        made = [tensor.clone() for tensor in attacked(shard)]
        if shard in (1, 5):
            made[0][7] = math.inf
        return made

    value, trusted = all_alike("trimmed-mean", ran_over)
    assert [shard for shard in range(SHARDS) if not trusted[shard]] == [1, 3, 5, 7]
    assert (value[0] > -1.0).double().mean() > 0.99, "four times the opposite of the others is not in it"


class RemembersDraws(RobustShards):
    def __init__(self) -> None:
        super().__init__(parse("median"), F)
        self.draws: list[int] = []

    def reduce(self, work: Work) -> tuple[bool, ...]:
        self.draws.append(work.draw)
        return super().reduce(work)


def test_every_path_hands_on_the_step_s_draw() -> None:
    seen = RemembersDraws()
    for crew, by_member in paths("median", honest, aggregator=seen):
        before = len(seen.draws)
        crew.reduce(by_member)
        assert seen.draws[before:] and set(seen.draws) == {ReductionTerms(SHARDS, False).draw(STEP)}
        crew.close()


def test_every_step_of_every_run_draws_anew() -> None:
    draws = {ReductionTerms(SHARDS, False, seed=seed).draw(step) for seed in (0, 1) for step in range(50)}
    assert len(draws) == 100
    assert ReductionTerms(SHARDS, True, seed=1).draw(7) == ReductionTerms(SHARDS, False, seed=1).draw(7)


def test_buckets_of_shards_are_dealt_by_the_draw() -> None:
    rows = [torch.cat([one.float().reshape(-1) for one in honest(shard)[:1]]) for shard in range(SHARDS)]
    layout = Layout([rows[0]], 1)
    found = []
    for draw in (1, 1, 2):
        out = torch.empty_like(rows[0])
        work = Work(layout, [Cut(rows, out, 0)], tuple((row, row + 1) for row in range(SHARDS)), SHARDS, draw=draw)
        RobustShards(parse("bucketing:2+median"), F).reduce(work)
        found.append(out)
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])
