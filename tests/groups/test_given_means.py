"""A mean that is given to a group: all of its ranks take their parts, or the step is committed nowhere in it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from holdfast.core.errors import PeerError
from holdfast.engine.gradients import Gradients, Way
from holdfast.engine.ranks.given_means import MEAN, SETTLED, PartOfMean, why_not_in_all
from holdfast.engine.ranks.link import Link, Links
from holdfast.membership import messages as m
from holdfast.modes.capture import GradientCapture
from holdfast.reduce.aggregators import Mean
from holdfast.reduce.arena import Arena
from holdfast.reduce.reduction import KeptMean
from holdfast.reduce.sums import Sums

STEP = 7


def mean_of(step: int, capture: GradientCapture) -> KeptMean:
    layout = capture.layout()
    memory = torch.full((layout.slot_bytes,), step, dtype=torch.uint8)
    return KeptMean(step, layout, memory, frozenset([0]), {}, lambda: True)


@dataclass
class Rank:
    """Not the first. In its own thread, as it would be in its own process."""

    link: Link
    capture: GradientCapture
    finds: Callable[[], bool]  # its part, at the giver's rank
    kept: KeptMean | None = None
    thread: threading.Thread = field(init=False)

    def __post_init__(self) -> None:
        self.kept = mean_of(STEP - 1, self.capture)
        self.thread = threading.Thread(target=self._follow, daemon=True)
        self.thread.start()

    def _follow(self) -> None:
        part = PartOfMean(self.link, self, self._fetch)
        heeded = {MEAN: part.look, SETTLED: part.settle}
        kind = ""
        while kind != SETTLED:
            message = self.link.receive(30.0)
            assert message is not None
            kind = message[0]
            heeded[kind](*message[1:])

    def _fetch(self, step: int, giver: str) -> bool:
        found = self.finds()
        if found:
            self.kept = mean_of(step, self.capture)
        return found


class GivingGroup:
    """It sends rank 0 its part at once."""

    def exchange(
        self, sends: Any, receives: Sequence[tuple[str, Sequence[memoryview]]], *, interrupted: Callable[[], str]
    ) -> None:
        for _, buffers in receives:
            for buffer in buffers:
                buffer[:] = bytes([STEP]) * len(buffer)


@dataclass
class GroupOfRanks:
    """The one that is given the mean: rank 0's gradients, and the other ranks."""

    gradients: Gradients
    others: list[Rank]
    sockets: list[socket.socket]

    def receive(self) -> None:
        giver: Any = GivingGroup()
        note = {"p": [0], "m": {}}
        try:
            self.gradients.receive(giver, "w1.1", m.GivenMean(STEP), note, lambda: "")
        finally:
            for rank in self.others:
                rank.thread.join(30.0)
                assert not rank.thread.is_alive()
            for sock in self.sockets:
                sock.close()

    @property
    def steps(self) -> list[int]:
        return [one.kept.step if one.kept is not None else -1 for one in (self.gradients, *self.others)]


def group_of(finds: Sequence[Callable[[], bool]], is_gone: Callable[[], bool]) -> GroupOfRanks:
    capture = GradientCapture(torch.nn.Linear(2, 2))
    arena = Arena.create(4, capture.whole_layout().slot_bytes)
    way = Way("shared-memory", small=False, whole=True)
    gradients = Gradients(
        "w0.1", arena=arena, sums=Sums(arena, 2, parities=1), capture=capture, way=way, aggregator=Mean()
    )
    gradients.kept = mean_of(STEP - 1, capture)
    pairs = [socket.socketpair() for _ in finds]
    links = Links([near for near, _ in pairs])
    gradients.why_not_in_all = lambda step, giver: why_not_in_all(links, step, giver, is_gone=is_gone)
    ranks = [Rank(Link(far), capture, find) for (_, far), find in zip(pairs, finds, strict=True)]
    return GroupOfRanks(gradients, ranks, [sock for pair in pairs for sock in pair])


def test_a_part_that_is_late_is_waited_for() -> None:
    answers = iter([False, False, True])
    group = group_of([lambda: True, lambda: next(answers)], lambda: False)
    group.receive()
    assert group.steps == [STEP, STEP, STEP]
    assert next(answers, None) is None  # and it is asked for no more


def test_no_rank_takes_a_mean_whose_giver_was_lost_before_all_had_theirs() -> None:
    """Rank 0 has it, and rank 1; the giver's rank 2 was gone. Else rank 0 had committed, and rank 2 been evicted."""
    lost = threading.Event()

    def finds_nobody() -> bool:
        lost.set()
        return False

    group = group_of([lambda: True, finds_nobody], lost.is_set)
    with pytest.raises(PeerError, match="lost before rank 2 here had its part of the mean of step 7"):
        group.receive()
    assert group.steps == [STEP - 1] * 3


def test_nobody_waits_for_ever_for_a_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.engine.ranks.given_means.WAIT_S", 0.05)
    group = group_of([lambda: False], lambda: False)
    with pytest.raises(PeerError, match="rank 1 here was not given its part"):
        group.receive()
    assert group.steps == [STEP - 1] * 2
