"""The rules of views: each decision, with its reason."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.words import View
from holdfast.membership.view_rules import (
    Decision,
    LedgerState,
    Patience,
    Registered,
    Report,
    Standing,
    Timing,
    assign,
    propose_first,
    propose_next,
    propose_planned,
    reconcile,
)

TIMING = Timing()


def ledger(*ids: str, view: View | None = None, size: int = 3, dead: tuple[str, ...] = ()) -> LedgerState:
    registered = tuple(Registered(id, created) for created, id in enumerate(ids, 1))
    return LedgerState(view=view, registered=registered, size=size, dead=frozenset(dead))


def next_view(me: str, state: LedgerState, **changes: object) -> Decision:
    return propose_next(me, state, Standing(**changes), TIMING)  # type: ignore[arg-type]


def test_the_first_living_member_proposes_and_says_why() -> None:
    view = View(4, ("a", "b", "c"))
    decision = next_view("b", ledger("b", "c", view=view))
    assert decision.view == View(5, ("b", "c"), "lost a")
    assert next_view("c", ledger("b", "c", view=view)).view is None


def test_spares_fill_the_places_of_the_lost_in_the_same_view() -> None:
    decision = next_view("a", ledger("a", "s", "t", view=View(1, ("a", "b", "c")), size=2))
    assert decision.view == View(2, ("a", "s"), "lost b, c; s joined")


def test_a_broken_connection_gives_the_ledger_time_to_say_who_died() -> None:
    state = ledger("a", "b", view=View(1, ("a", "b")), size=2)
    assert next_view("a", state).reason == "waiting for the ledger to say who was lost"
    assert next_view("a", state, waited_s=1.0).view == View(2, ("a", "b"), "a connection broke")


def test_a_member_without_state_waits_for_one_that_may_have_it() -> None:
    view = View(1, ("a", "b"))
    assert next_view("b", ledger("b", view=view), has_state=False).view is None
    assert next_view("b", ledger("b", view=view, dead=("a",)), has_state=False).view is not None
    assert next_view("b", ledger("b", view=view), has_state=False, waited_s=61.0).view is not None


def test_nobody_waits_for_a_state_that_the_run_has_gone_back_from() -> None:
    state = ledger("n", view=View(1, ("a", "b")), size=1, dead=("b",))
    decision = propose_first("n", state, waited_s=5.0, timing=TIMING)
    assert "may still be alive" in decision.reason
    assert decision.patience == Patience(("a",), TIMING.abandon_s - 5.0)
    decision = propose_first("n", replace(state, rewound=True), waited_s=5.0, timing=TIMING)
    assert decision.view == View(2, ("n",), "all workers of view 1 are lost")
    lives = ledger("a", "n", view=View(1, ("a", "b")), size=1, dead=("b",))
    assert propose_first("n", replace(lives, rewound=True), waited_s=5.0, timing=TIMING).view is None


def test_a_run_starts_when_all_are_here_or_the_wait_is_over() -> None:
    state = ledger("a", "b")
    assert propose_first("a", state, waited_s=0.0, timing=TIMING).reason == "waiting for workers: 2 of 3 are here"
    assert propose_first("b", state, waited_s=99.0, timing=TIMING).view is None
    assert propose_first("a", state, waited_s=99.0, timing=TIMING).view == View(1, ("a", "b"), "the run starts")


def test_a_silent_worker_is_not_given_up_for_new_ones_before_its_time() -> None:
    state = ledger("n", view=View(7, ("a",)), size=1)
    assert "may still be alive" in propose_first("n", state, waited_s=5.0, timing=TIMING).reason
    gone = ledger("n", view=View(7, ("a",)), size=1, dead=("a",))
    assert propose_first("n", gone, waited_s=5.0, timing=TIMING).view == View(
        8, ("n",), "all workers of view 7 are lost"
    )


def test_who_is_a_step_behind_is_sent_the_step() -> None:
    reports = {"a": Report(5, kept=True), "b": Report(4, held=(0, 1)), "c": Report(None)}
    plan = reconcile(View(2, ("a", "b", "c")), reports, 4)
    assert plan.step == 5 and plan.gives == {"b": "a"} and plan.fetches == {"c": ("a",)}
    assert sorted(shard for shards in plan.assignment.values() for shard in shards) == [0, 1, 2, 3]
    assert "c" not in plan.assignment


def test_who_cannot_be_made_level_is_evicted_with_a_reason() -> None:
    plan = reconcile(View(2, ("a", "b")), {"a": Report(5), "b": Report(4)}, 2)
    assert "nobody holds" in plan.evicted["b"] and set(plan.assignment) == {"a"}


def test_sums_that_are_held_are_not_computed_again() -> None:
    reports = {"a": Report(5, held=(0, 1)), "b": Report(5, held=(4, 5))}
    plan = reconcile(View(2, ("a", "b")), reports, 6)
    assert plan.assignment == {"a": (0, 1, 2), "b": (3, 4, 5)}


def test_without_any_state_the_first_members_is_the_runs() -> None:
    reports = {"a": Report(None, digest="x"), "b": Report(None, digest="y"), "c": Report(None, digest="x")}
    plan = reconcile(View(1, ("a", "b", "c")), reports, 4)
    assert plan.step == 0 and plan.fetches == {"b": ("a", "c")} and set(plan.assignment) == {"a", "c"}


@given(st.integers(1, 64), st.integers(1, 9), st.data())
def test_every_shard_is_assigned_once_and_evenly(shards: int, count: int, data: st.DataObject) -> None:
    members = [f"w{index}" for index in range(count)]
    owners = data.draw(st.lists(st.sampled_from([*members, ""]), min_size=shards, max_size=shards))
    held = {member: frozenset(s for s in range(shards) if owners[s] == member) for member in members}
    result = assign(shards, members, held)
    assert sorted(shard for mine in result.values() for shard in mine) == list(range(shards))
    assert all(held[member] <= set(result[member]) for member in members)
    fresh = assign(shards, members)
    sizes = [len(mine) for mine in fresh.values()]
    assert max(sizes) - min(sizes) <= 1
    assert all(mine == tuple(range(mine[0], mine[-1] + 1)) for mine in fresh.values() if mine)


def test_planned_changes_are_the_first_members_to_propose() -> None:
    view = View(3, ("a", "b"))
    state = ledger("a", "b", "c", view=view)
    assert propose_planned("a", state, frozenset()).view == View(4, ("a", "b", "c"), "c joined")
    assert propose_planned("b", state, frozenset()).view is None
    assert propose_planned("a", state, frozenset({"c"})).view is None
    assert propose_planned("b", ledger("b", view=view), frozenset()).view == View(4, ("b",), "lost a")
    assert propose_planned("a", ledger("a", "b", view=view, size=1), frozenset()).reason == "b left"
    smaller = propose_planned("a", ledger("a", "b", view=view, size=1), frozenset()).view
    assert smaller is not None and smaller.members == ("a",)
