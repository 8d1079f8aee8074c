"""Who forms the next world of ranks: pure decisions over what the ledger says."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.core.words import View
from holdfast.horovod.world.rules import GRACE_S, START_WAIT_S, Move, WorldStanding, newcomers, next_move
from holdfast.membership.view_rules import LedgerState, Registered


def state(*registered: str, view: View | None = None, **more: Any) -> LedgerState:
    people = tuple(Registered(worker, number + 1) for number, worker in enumerate(registered))
    return LedgerState(view=view, view_revision=7, registered=people, **more)


def move(ledger: LedgerState, me: str, **more: Any) -> Move:
    return next_move(ledger, WorldStanding(me=me, **more))


FIRST = View(1, ("a", "b", "c"))


def test_a_run_begins_when_all_are_there_or_have_been_waited_for() -> None:
    assert move(state("a", "b", size=3), "a").propose is None
    found = move(state("b", "a", "c", size=3), "a").propose
    assert found is not None and (found.number, found.members) == (1, ("b", "a", "c"))
    late = move(state("a", "b", size=3), "a", waited_s=START_WAIT_S).propose
    assert late is not None and late.members == ("a", "b")


def test_who_is_not_registered_proposes_nothing() -> None:
    assert move(state("b", size=1), "a") == Move("the ledger does not show this worker yet")


def test_a_view_with_this_worker_is_entered_unless_it_was_left() -> None:
    assert move(state("a", "b", "c", view=FIRST, size=3), "a").enter == FIRST
    again = move(state("a", "b", "c", view=FIRST, size=3), "a", left=1)
    assert again.enter is None and again.propose == View(2, ("a", "b", "c"), "the members meet again")


def test_survivors_come_first_in_their_order_and_then_who_is_new() -> None:
    """Rank 0 must have the state, if anybody has."""
    found = move(state("d", "c", "b", view=FIRST, size=3), "c", left=1).propose
    assert found == View(2, ("b", "c", "d"), "a gone; d new")


def test_more_than_the_size_wait_and_members_are_never_left_out_for_them() -> None:
    found = move(state("a", "b", "c", "d", "e", view=FIRST, size=4), "a", left=1).propose
    assert found is not None and found.members == ("a", "b", "c", "d")
    smaller = move(state("a", "b", "c", "d", view=FIRST, size=2), "a", left=1).propose
    assert smaller is not None and smaller.members == ("a", "b", "c")


def test_a_lost_member_is_waited_for_until_the_ledger_knows_more() -> None:
    ledger = state("a", "b", "c", view=FIRST, size=3)
    assert move(ledger, "a", left=1, lost=frozenset({"c"})).propose is None
    found = move(ledger, "a", left=1, lost=frozenset({"c"}), waited_s=GRACE_S).propose
    assert found is not None and found.members == ("a", "b", "c")  # it lives: it has only lost the others
    dead = state("a", "b", "c", view=FIRST, size=3, dead=frozenset({"c"}))
    found = move(dead, "a", left=1, lost=frozenset({"c"})).propose
    assert found is not None and found.members == ("a", "b")


def test_who_comes_waits_for_the_members_and_begins_anew_only_without_any() -> None:
    assert "to take this worker in" in move(state("a", "d", view=FIRST, size=3), "d").reason
    alone = state("d", "e", "f", view=FIRST, size=3)
    found = move(alone, "d").propose
    assert found is not None and found.members == ("d", "e", "f") and found.number == 2
    assert move(state("d", view=FIRST, size=3), "d").propose is None


@pytest.mark.parametrize("over", [{"done": True}, {"stop": "because"}])
def test_nobody_begins_again_when_it_is_over(over: dict[str, Any]) -> None:
    assert move(state("a", size=1, **over), "a").end


def test_no_world_below_the_least_size() -> None:
    ledger = state("a", "b", view=FIRST, size=3)
    assert move(ledger, "a", left=1, least=3).propose is None
    assert move(ledger, "a", left=1, least=2).propose is not None


def test_members_meet_again_for_those_that_there_is_room_for() -> None:
    members = frozenset("ab")
    assert newcomers(state("a", "b", "d", size=3), members)
    assert not newcomers(state("a", "b", "d", size=2), members)
    assert not newcomers(state("a", "b", size=3), members)
    assert newcomers(state("a", "b", size=2, stop="asked"), members)
