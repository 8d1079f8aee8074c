"""Which collectives are complete: pure, with ranks that submit in any order and hear each other at any time."""

from __future__ import annotations

import random
from collections import deque

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.errors import ProtocolError
from holdfast.horovod.exchange.blocks import ALIGNMENT, Blocks
from holdfast.horovod.exchange.carrier import Alone
from holdfast.horovod.exchange.engine import Exchange
from holdfast.horovod.exchange.matching import Announced, Matched, Matching
from holdfast.horovod.exchange.records import Record, What
from holdfast.horovod.exchange.words import Kind, Op, Request, disagreement, share_of


class Rank:
    """A matcher, and what the others have not heard from it yet."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.matching = Matching(rank, size)
        self.serial = 0
        self.inboxes = {other: deque[Announced]() for other in range(size) if other != rank}
        self.done: list[Matched] = []

    def submit(self, request: Request) -> Announced:
        self.serial += 1
        announced = Announced(request, self.serial, self.matching.next_count(request.members, request.key), b"")
        for inbox in self.inboxes.values():
            inbox.append(announced)
        self.done += self.matching.heard(self.rank, announced)
        return announced

    def hear(self, other: Rank) -> None:
        if other.inboxes[self.rank]:
            self.done += self.matching.heard(other.rank, other.inboxes[self.rank].popleft())


def ask(name: str, kind: Kind = Kind.ALLREDUCE, **more: object) -> Request:
    return Request(kind=kind, name=name, dtypes=("float32",), shapes=((2,),), **more)  # type: ignore[arg-type]


@settings(max_examples=60)
@given(st.integers(2, 4), st.integers(0, 10_000))
def test_every_rank_finds_the_same_complete_whatever_comes_first(size: int, seed: int) -> None:
    chance = random.Random(seed)
    ranks = [Rank(rank, size) for rank in range(size)]
    names = [chance.choice(["a", "b", "c", ""]) for _ in range(12)]
    todo = []
    for _ in range(size):
        named = [name for name in names if name]
        chance.shuffle(named)  # names in any order; those without one in their own
        todo.append(deque([*named, *[""] * (len(names) - len(named))]))
    while any(todo) or any(inbox for rank in ranks for inbox in rank.inboxes.values()):
        rank = chance.randrange(size)
        if todo[rank] and chance.random() < 0.3:
            ranks[rank].submit(ask(todo[rank].popleft()))
        else:
            ranks[rank].hear(ranks[chance.choice([one for one in range(size) if one != rank])])
    for rank in ranks:
        assert {matched.ident for matched in rank.done} == {matched.ident for matched in ranks[0].done}
        assert len(rank.done) == len(names) and not any(matched.trouble for matched in rank.done)
        assert all(matched.ranks == list(range(size)) for matched in rank.done)


@settings(max_examples=60)
@given(st.integers(0, 10_000))
def test_who_has_joined_takes_no_part_and_counts_all_the_same(seed: int) -> None:
    chance, size = random.Random(seed), 3
    ranks = [Rank(rank, size) for rank in range(size)]
    turns = [2, 4, 4]
    script = [
        [ask("t")] * turns[rank] + [ask("join", Kind.JOIN, stamp=rank + 1), ask(""), ask("t")] for rank in range(size)
    ]
    waiting = [deque(one) for one in script]
    while any(waiting) or any(inbox for rank in ranks for inbox in rank.inboxes.values()):
        rank = chance.randrange(size)
        mine = ranks[rank]
        asked = len(script[rank]) - len(waiting[rank])
        took_part = sum(rank in matched.parts for matched in mine.done)
        if waiting[rank] and took_part == asked:  # it waits for each before the next
            mine.submit(waiting[rank].popleft())
        else:
            mine.hear(ranks[chance.choice([one for one in range(size) if one != rank])])
    for mine in ranks:
        found = [(matched.ident[1], len(matched.parts)) for matched in mine.done]
        assert found == [("allreduce.t", 3)] * 2 + [("allreduce.t", 2)] * 2 + [
            ("join.join", 3),
            ("", 3),
            ("allreduce.t", 3),
        ]
        assert mine.matching.last_joined == 2


def test_a_standstill_names_who_waits_for_whom_and_is_given_up_by_all_alike() -> None:
    ranks = [Rank(rank, 2) for rank in range(2)]
    serials = {rank.rank: rank.submit(ask(f"of {rank.rank}")).serial for rank in ranks}
    ranks[0].hear(ranks[1])
    ranks[1].hear(ranks[0])
    assert ranks[0].matching.standstill() == ("", [])
    for rank in ranks:
        for other, serial in serials.items():
            rank.matching.waits(other, serial)
    why, idents = ranks[0].matching.standstill()
    assert "rank 0 waits for allreduce 'of 0', which rank 1 has not submitted" in why
    assert why == ranks[1].matching.standstill()[0] and len(idents) == 2
    ranks[0].matching.give_up(idents)
    ranks[0].submit(ask("after"))
    ranks[1].hear(ranks[0])  # before it has heard that rank 0 has given up
    ranks[1].matching.give_up(idents)
    ranks[1].submit(ask("after"))
    ranks[0].hear(ranks[1])
    assert [matched.ident[1] for matched in ranks[0].done] == ["allreduce.after"]
    assert [matched.ident[1] for matched in ranks[1].done] == ["allreduce.after"]


def tell_all(ranks: list[Rank]) -> None:
    for mine in ranks:
        for other in ranks:
            if other is not mine:
                while other.inboxes[mine.rank]:
                    mine.hear(other)


def wait_for(ranks: list[Rank], waiting: dict[int, int]) -> None:
    for mine in ranks:
        for rank, serial in waiting.items():
            mine.matching.waits(rank, serial)


def test_two_of_four_ranks_that_wait_crosswise_stand_still_while_the_others_are_busy() -> None:
    """Who waits for a rank that is busy does not; and what goes on between the others is left alone."""
    ranks = [Rank(rank, 4) for rank in range(4)]
    waiting = {rank: ranks[rank].submit(ask(f"of {rank}")).serial for rank in (0, 1)}
    ranks[3].submit(ask("of all"))
    tell_all(ranks)
    wait_for(ranks, {0: waiting[0]})
    assert ranks[3].matching.standstill() == ("", []), "rank 1 may be about to submit it"
    wait_for(ranks, waiting)
    why, idents = ranks[3].matching.standstill()
    assert (
        "rank 0 waits for allreduce 'of 0', which rank 1, 2, 3 has not submitted" in why and "rank 3 waits" not in why
    )
    assert sorted(ident[1] for ident in idents) == ["allreduce.of 0", "allreduce.of 1"]
    ranks[2].submit(ask("of 0"))  # it has not heard of it
    for rank in ranks:
        rank.matching.give_up(idents)
    tell_all(ranks)
    assert not any(rank.done for rank in ranks)
    for rank in ranks:
        rank.submit(ask("of 0"))
    tell_all(ranks)
    assert all([matched.ident for matched in rank.done] == [(0, "allreduce.of 0", 1)] for rank in ranks)


def test_a_rank_of_no_set_sees_who_waits_in_a_circle_of_sets() -> None:
    ranks = [Rank(rank, 4) for rank in range(4)]
    for number, members in enumerate(([0, 1], [1, 2], [0, 2]), start=1):
        for rank in ranks:
            rank.matching.add_set(number, members)
    waiting = {
        0: ranks[0].submit(ask("x", members=1)).serial,
        1: ranks[1].submit(ask("x", members=2)).serial,
        2: ranks[2].submit(ask("x", members=3)).serial,
    }
    tell_all(ranks)
    wait_for(ranks, waiting)
    found = {rank.matching.standstill()[0] for rank in ranks}
    assert len(found) == 1 and "rank 2 waits for allreduce 'x', which rank 0 has not submitted" in found.pop()


def test_who_waits_for_a_rank_that_has_left_stands_still_and_who_waits_for_a_busy_one_does_not() -> None:
    ranks = [Rank(rank, 3) for rank in range(3)]
    serial = ranks[0].submit(ask("x")).serial
    tell_all(ranks)
    wait_for(ranks, {0: serial})
    assert not ranks[1].matching.standstill(left={2} - {2})[0]
    assert "which rank 1, 2 has not submitted" in ranks[1].matching.standstill(left={2})[0]


def test_unnamed_collectives_that_are_given_up_leave_no_gap_in_the_counts() -> None:
    ranks = [Rank(rank, 3) for rank in range(3)]
    for rank in (0, 1):
        ranks[rank].submit(ask(""))  # rank 2 is about to
    serial = ranks[0].submit(ask("")).serial
    other = ranks[1].submit(ask("y")).serial
    tell_all(ranks)
    wait_for(ranks, {0: serial, 1: other})
    _, idents = ranks[0].matching.standstill()
    assert sorted(idents) == [(0, "", 1), (0, "allreduce.y", 0)]
    for rank in ranks:
        rank.matching.give_up(idents)
    ranks[2].submit(ask(""))
    tell_all(ranks)
    assert all([matched.ident for matched in rank.done] == [(0, "", 0)] for rank in ranks)
    for rank in ranks:
        rank.submit(ask(""))
    tell_all(ranks)
    assert all(rank.done[-1].ident == (0, "", 2) for rank in ranks)


def test_a_process_set_that_others_have_made_already() -> None:
    ranks = [Rank(rank, 3) for rank in range(3)]
    ranks[0].matching.add_set(1, [0, 1])
    ranks[0].submit(ask("x", members=1))
    ranks[1].hear(ranks[0])
    ranks[2].hear(ranks[0])
    assert ranks[1].matching.add_set(1, [1, 0]) == []
    ranks[1].submit(ask("x", members=1))
    assert [matched.ranks for matched in ranks[1].done] == [[0, 1]] and not ranks[2].done


@pytest.mark.parametrize(
    ("one", "other", "words"),
    [
        ({}, {"shapes": ((3,),)}, "the shape (2,), rank 1 (3,)"),
        ({}, {"dtypes": ("int8",)}, "the dtype float32, rank 1 int8"),
        ({}, {"op": Op.MAX}, "the op Sum, rank 1 Max"),
        ({}, {"kind": Kind.ALLGATHER}, "asks for allreduce, rank 1 for allgather"),
        ({}, {"trouble": "no"}, "rank 1: no"),
        ({}, {"prescale": 2.0}, "scale factors"),
    ],
)
def test_what_does_not_fit_is_named(one: dict[str, object], other: dict[str, object], words: str) -> None:
    plain = {"kind": Kind.ALLREDUCE, "name": "x", "dtypes": ("float32",), "shapes": ((2,),)}
    requests = [Request(**{**plain, **more}) for more in (one, other)]  # type: ignore[arg-type]
    assert words in disagreement(dict(enumerate(requests)))
    assert not disagreement({0: requests[0], 1: requests[0]})


def test_requests_and_records_survive_the_way_over_bytes() -> None:
    request = Request(
        kind=Kind.ALLTOALL,
        name="é",
        members=3,
        dtypes=("bfloat16",),
        shapes=((4, 0),),
        prescale=0.1,
        splits=(1, 3),
        stamp=7,
    )
    assert Request.decode(request.encode()) == request
    record = Record(What.ANNOUNCE, 1, 2, 3, 4, request.encode(), b"data")
    assert Record.decode(record.encode()) == record
    long = Record(What.ANNOUNCE, 1, text=grouped(5_000).encode())
    assert len(long.text) > 65_535 and Record.decode(long.encode()) == long
    for data in (b"", b"x" * 60, record.encode()[:-1], b"[1]"):
        with pytest.raises(ProtocolError):
            Record.decode(data)
        with pytest.raises(ProtocolError):
            Request.decode(data)


def grouped(tensors: int) -> Request:
    return Request(kind=Kind.ALLREDUCE, name="all", dtypes=("float32",) * tensors, shapes=((3, 7),) * tensors)


def test_a_group_of_thousands_of_tensors_is_announced_and_one_beyond_all_bounds_refused() -> None:
    exchange = Exchange(Alone(), 0, 1)
    try:
        tensors = [torch.full((3, 7), float(number)) for number in range(5_000)]
        done = exchange.synchronize(exchange.submit(grouped(5_000), tensors))
        assert all(map(torch.equal, done.results, tensors))
        with pytest.raises(ValueError, match="make several groups"):
            exchange.submit(grouped(40_000))
        assert exchange.synchronize(exchange.submit(grouped(1), tensors[:1])).error is None  # it goes on
    finally:
        exchange.close()


@settings(max_examples=60)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 5 * ALIGNMENT)), max_size=40))
def test_blocks_never_overlap_and_all_room_comes_back(turns: list[tuple[bool, int]]) -> None:
    blocks, taken = Blocks(32 * ALIGNMENT), dict[int, int]()
    for take, length in turns:
        if take:
            at = blocks.take(length)
            if at is not None:
                assert all(at + length <= start or start + size <= at for start, size in taken.items())
                taken[at] = length
        elif taken:
            at = sorted(taken)[length % len(taken)]
            del taken[at]
            blocks.give_back(at)
    for at in taken:
        blocks.give_back(at)
    assert blocks.take(32 * ALIGNMENT) == 0


def test_rows_are_shared_as_evenly_as_can_be() -> None:
    assert share_of(7, 3) == [3, 2, 2] and share_of(1, 3) == [1, 0, 0] and share_of(0, 2) == [0, 0]
