"""The rules of the elastic mode: how many shards a step has, and what becomes of those that are missing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.words import View
from holdfast.membership.codec import decode, encode
from holdfast.membership.machine import Machine, Phase
from holdfast.membership.messages import Ready
from holdfast.membership.view_rules import Report, reconcile
from holdfast.modes.elastic.rules import ElasticRules, QuorumRules, room, size_of
from holdfast.net.framing import LENGTH

MEMBERS = ("w0.1", "w1.1", "w2.1")


@given(st.integers(1, 64), st.integers(1, 12), st.integers(1, 12))
def test_nobody_does_more_than_in_a_full_run(shards: int, workers: int, size: int) -> None:
    count = room(shards, workers, size)
    assert 1 <= count <= shards
    assert count <= workers * room(shards, 1, size)
    if workers >= size:
        assert count == shards


def test_what_is_there_stays_and_the_rest_is_not_computed_again() -> None:
    reports = {
        "w0.1": Report(4, (0, 1), True, size=4),
        "w1.1": Report(4, (5,), True, size=4),
        "w2.1": Report(3, (2, 3), size=4),  # it is sent step 3 first, and holds nothing of step 4
    }
    plan = ElasticRules().settle(reconcile(View(2, MEMBERS), reports, 8), reports, 8)
    assert plan.assignment == {"w0.1": (0, 1), "w1.1": (5,), "w2.1": ()} and plan.gives


def test_a_step_of_which_nothing_is_there_begins_anew_with_what_there_is_room_for() -> None:
    reports = {"w0.1": Report(4, size=4), "w1.1": Report(4, size=3), "w2.1": Report(None, size=4)}
    plan = ElasticRules().settle(reconcile(View(2, MEMBERS), reports, 8), reports, 8)
    assert size_of(reports) == 4
    assert plan.assignment == {"w0.1": (0, 1), "w1.1": (2, 3)} and "w2.1" in plan.fetches


def test_a_report_says_how_large_the_run_is_meant_to_be() -> None:
    report = Report(4, (1,), True, size=3)
    assert decode(encode(report)[LENGTH.size :])[0] == report


def late(*ready: tuple[int, ...], quorum: int) -> bool:
    """Whether one of four, still computing, is not waited for when others have brought these shards."""
    machine = Machine("w0.1", shards=8, step_rules=QuorumRules(quorum))
    members = tuple(f"w{slot}.1" for slot in range(4))
    machine.view, machine.next, machine.phase = View(1, members), 3, Phase.COMPUTING
    machine._ready = {3: {f"w{slot}.1": Ready(3, shards) for slot, shards in enumerate(ready, start=1)}}
    return machine.closes()


def test_a_step_is_closed_when_enough_others_have_brought_shards() -> None:
    assert not late((0, 1), (2, 3), quorum=3)
    assert late((0, 1), (2, 3), (4,), quorum=3)
    assert not late((0,), (), quorum=2)  # who has none is there at once: that says nothing of me
    assert late((0,), (), (), quorum=2)  # but all others are there
    assert not late((), (), (), quorum=2)
    assert not late((0,), (1,), (2,), quorum=4)  # never without all
