"""Who can reach whom, who is left out when not everybody can, and how long a place rests afterwards."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.errors import ProtocolError
from holdfast.core.words import View
from holdfast.membership.knocking import LOST_FACTOR, Knocking
from holdfast.membership.messages import Knocked
from holdfast.membership.reach import Pair, Roll, separate, severed
from holdfast.membership.resting import Resting
from holdfast.membership.view_rules import Decision, LedgerState, Registered, Standing, Timing, propose_next

TIMING = Timing()
HOSTS = ("w0.1@alpha", "w1.1@alpha", "w0.1@beta", "w1.1@beta", "w0.1@gamma")
names = st.lists(st.text(max_size=12), max_size=6).map(tuple)


def rolls_of(members: tuple[str, ...], cut: set[frozenset[str]], view: int = 1) -> dict[str, Roll]:
    """What everyone says when these pairs cannot reach each other."""
    return {
        one: Roll(
            view,
            tuple(other for other in members if other != one and frozenset((one, other)) not in cut),
            tuple(other for other in members if frozenset((one, other)) in cut),
            True,
        )
        for one in members
    }


def next_view(me: str, view: View, **standing: object) -> Decision:
    registered = tuple(Registered(id, created) for created, id in enumerate(view.members, 1))
    ledger = LedgerState(view=view, registered=registered, size=len(view.members))
    return propose_next(me, ledger, Standing(waited_s=1.0, **standing), TIMING)  # type: ignore[arg-type]


# ---- rolls


@given(st.builds(Roll, st.integers(0, 1 << 40), names, names, st.booleans()))
def test_a_roll_survives_the_ledger(roll: Roll) -> None:
    assert Roll.decode(roll.encode()) == roll


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b'{"view":true,"reached":[],"missed":[],"has_state":true}',
        b'{"view":1,"reached":"ab","missed":[],"has_state":true}',
        b'{"view":1,"reached":[1],"missed":[],"has_state":true}',
        b'{"view":1,"reached":[],"missed":[],"has_state":1}',
    ],
)
def test_what_is_no_roll_is_a_typed_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        Roll.decode(data)


# ---- who cannot reach whom


def test_nobody_is_severed_without_a_complaint() -> None:
    assert severed(HOSTS, {}) == frozenset()
    assert severed(HOSTS, rolls_of(HOSTS, set())) == frozenset()


def test_the_newer_roll_of_a_pair_counts_and_of_two_equal_ones_that_of_who_dials() -> None:
    missed, reached = Roll(3, missed=("b",)), Roll(4, reached=("a",))
    assert severed(("a", "b"), {"a": missed, "b": reached}) == frozenset()
    assert severed(("a", "b"), {"a": Roll(4, missed=("b",)), "b": Roll(3, reached=("a",))}) == {("a", "b")}
    assert severed(("a", "b"), {"a": Roll(3, reached=("b",)), "b": Roll(3, missed=("a",))}) == {("a", "b")}


def test_what_one_pair_says_of_two_hosts_holds_for_those_whose_loops_compute() -> None:
    rolls = {"w0.1@alpha": Roll(1, ("w1.1@alpha", "w0.1@gamma"), ("w0.1@beta", "w1.1@beta"))}
    pairs = severed(HOSTS, rolls)
    assert ("w1.1@alpha", "w1.1@beta") in pairs and len(pairs) == 4
    # ... unless another pair of these hosts says the opposite: then it is no cut between hosts.
    rolls["w1.1@beta"] = Roll(1, ("w1.1@alpha",))
    assert ("w1.1@alpha", "w0.1@beta") not in severed(HOSTS, rolls)


def test_a_complaint_between_neighbours_is_not_extended_to_their_host() -> None:
    assert severed(HOSTS[:2], {"w1.1@alpha": Roll(1, missed=("w0.1@alpha",))}) == {("w0.1@alpha", "w1.1@alpha")}
    local = ("w0.1", "w1.1", "w2.1")
    assert severed(local, {"w1.1": Roll(1, missed=("w0.1",))}) == {("w0.1", "w1.1")}


# ---- who is left out


def test_of_two_the_later_is_left_out_and_of_more_the_one_that_nobody_reaches() -> None:
    assert separate(("a", "b"), {("a", "b")}, frozenset()) == ("b",)
    assert separate(("a", "b", "c"), {("a", "b"), ("a", "c")}, frozenset()) == ("a",)


def test_the_smaller_side_of_a_cut_is_left_out() -> None:
    cut = {pair for pair in combinations(HOSTS, 2) if ("@alpha" in pair[0]) != ("@alpha" in pair[1])}
    assert separate(HOSTS, cut, frozenset()) == HOSTS[:2]


def test_newcomers_go_before_those_who_took_part() -> None:
    assert separate(("a", "b", "n"), {("a", "n"), ("b", "n")}, frozenset({"a", "n"})) == ("n",)
    assert separate(("n", "a"), {("n", "a")}, frozenset({"n"})) == ("n",)


@given(st.integers(1, 8), st.data())
def test_who_is_left_can_all_reach_each_other_and_nobody_is_left_out_in_vain(count: int, data: st.DataObject) -> None:
    members = tuple(f"w{index}" for index in range(count))
    pairs: set[Pair] = {pair for pair in combinations(members, 2) if data.draw(st.booleans())}
    newcomers = frozenset(member for member in members if data.draw(st.booleans()))
    out = separate(members, pairs, newcomers)
    kept = [member for member in members if member not in out]
    assert kept and not any(pair in pairs for pair in combinations(kept, 2))
    again = separate(members, list(pairs), newcomers)
    assert again == out
    for one in out:  # each one of them could not stay beside the others
        assert any(tuple(sorted((one, other))) in pairs for other in kept) or one in newcomers


# ---- what the first member proposes


def test_a_group_that_broke_for_no_reason_goes_on_with_the_same_members() -> None:
    view = View(1, ("a", "b", "c"))
    assert next_view("a", view, knocked=False).view is None
    decision = next_view("a", view, rolls=rolls_of(view.members, set()))
    assert decision.view == View(2, view.members, "a connection broke")


def test_who_is_cut_off_is_left_out_once_the_others_have_spoken_or_had_their_time() -> None:
    view = View(1, ("a", "b", "c"))
    mine = {"a": Roll(1, ("c",), ("b",), True)}
    assert next_view("a", view, rolls=mine).reason == "waiting for b to say whom it reaches"
    expected = View(2, ("a", "c"), "not everyone reaches b")
    both = rolls_of(view.members, {frozenset("ab"), frozenset("bc")})
    assert next_view("a", view, rolls=both).view == expected
    late = next_view("a", view, rolls={"a": mine["a"], "c": both["c"]}, roll_call_s=TIMING.roll_call_s)
    assert late.view == expected


def test_a_proposer_that_is_cut_off_lets_the_others_go_on_without_it() -> None:
    view = View(1, ("a", "b", "c"))
    rolls = rolls_of(view.members, {frozenset("ab"), frozenset("ac")})
    assert next_view("a", view, rolls=rolls).view == View(2, ("b", "c"), "not everyone reaches a")


def test_but_not_before_one_of_them_has_said_that_it_has_the_state() -> None:
    view = View(1, ("a", "b", "c"))
    rolls = {"a": Roll(1, (), ("b", "c"), True)}
    waiting = next_view("a", view, rolls=rolls, roll_call_s=TIMING.roll_call_s)
    assert waiting.view is None and "cut off" in waiting.reason
    joiners = {**rolls, "b": Roll(1, ("c",), ("a",), False), "c": Roll(1, ("b",), ("a",), False)}
    assert next_view("a", view, rolls=joiners).view == View(2, ("a",), "not everyone reaches b, c")


def test_one_without_state_does_not_leave_out_one_that_has_it() -> None:
    view = View(1, ("a", "b"))
    rolls = rolls_of(view.members, {frozenset("ab")})
    rolls["a"] = Roll(1, (), ("b",), False)
    assert "may have the state" in next_view("a", view, rolls=rolls, has_state=False).reason


def test_a_joiner_that_cannot_be_reached_is_left_out_again() -> None:
    view = View(2, ("a", "b", "n"))
    rolls = rolls_of(view.members, {frozenset("an"), frozenset("bn")})
    decision = next_view("a", view, rolls=rolls, newcomers=frozenset("n"))
    assert decision.view == View(3, ("a", "b"), "not everyone reaches n")


# ---- knocking and resting


def test_one_knock_at_a_time_and_only_its_own_answer_counts() -> None:
    knocking = Knocking(TIMING)
    (first,) = knocking.ask(["b"], 0.0, every_s=5.0)
    assert knocking.ask(["b"], 1.0, every_s=5.0) == []
    assert not knocking.answer(Knocked(first.number + 1, ("b",), ()), 2.0)
    assert knocking.answer(Knocked(first.number, ("b",), ()), 2.0) and knocking.reached == ("b",)
    assert not knocking.answer(Knocked(first.number, (), ("b",)), 2.0)
    assert knocking.answered_since(2.0) and not knocking.answered_since(2.1)
    assert knocking.ask(["b"], 6.9, every_s=5.0) == []
    assert knocking.ask(["b"], 7.0, every_s=5.0)


def test_a_knock_whose_answer_is_lost_is_made_again() -> None:
    knocking = Knocking(TIMING)
    knocking.ask(["b"], 0.0, every_s=5.0)
    late = LOST_FACTOR * TIMING.knock_s
    assert knocking.ask(["b"], late - 0.1, every_s=5.0) == []
    assert knocking.ask(["b"], late, every_s=5.0)


def test_one_outside_knocks_less_and_less_often_while_somebody_is_missed() -> None:
    knocking = Knocking(TIMING)
    patience = []
    now = 0.0
    for _ in range(8):
        (knock,) = knocking.ask(["b"], now, every_s=knocking.patience_s)
        knocking.answer(Knocked(knock.number, (), ("b",)), now)
        patience.append(knocking.patience_s)
        now += knocking.patience_s
    assert patience == sorted(patience) and patience[0] < patience[-1] == TIMING.knock_again_s_max
    (knock,) = knocking.ask(["b"], now, every_s=knocking.patience_s)
    knocking.answer(Knocked(knock.number, ("b",), ()), now)
    assert knocking.patience_s == TIMING.propose_again_s


def test_a_place_whose_joiner_cannot_be_reached_rests_longer_each_time() -> None:
    resting = Resting(TIMING)
    now, rests = 0.0, []
    for incarnation in range(1, 10):
        joiner = f"w3.{incarnation}@beta"
        ledger = LedgerState(registered=(Registered(joiner, incarnation),))
        assert resting.among(ledger, now) == frozenset()
        resting.left_out([joiner], frozenset({"a"}), ledger, now)
        began = now
        while resting.among(ledger, now):
            now += 1.0
        rests.append(now - began)
    assert rests[:3] == [5.0, 10.0, 20.0] and rests[-1] == TIMING.rest_s_max
    resting.formed(["w3.10@beta"])
    ledger = LedgerState(registered=(Registered("w3.11@beta", 1), Registered("w3.1@alpha", 2)))
    resting.left_out(["w3.11@beta"], frozenset({"a"}), ledger, now)
    assert resting.among(ledger, now) == {"w3.11@beta"}  # the same slot of another host does not rest
    assert resting.among(ledger, now + 5.0) == frozenset()


def test_who_took_part_and_was_left_out_is_out_for_good() -> None:
    resting = Resting(TIMING)
    ledger = LedgerState(registered=(Registered("a", 1), Registered("b", 2)))
    resting.left_out(["b"], frozenset({"a", "b"}), ledger, 0.0)
    assert resting.among(ledger, 1e9) == {"b"}


# ---- who stays, in more complicated cases


@given(st.lists(st.integers(0, 3), min_size=2, max_size=9))
def test_of_a_network_in_parts_the_largest_part_is_left(sides: list[int]) -> None:
    members = tuple(f"m{index}" for index in range(len(sides)))
    side = dict(zip(members, sides, strict=True))
    pairs = {pair for pair in combinations(members, 2) if side[pair[0]] != side[pair[1]]}
    kept = [member for member in members if member not in separate(members, pairs, frozenset())]
    assert len(kept) == max(sides.count(number) for number in set(sides))
    assert len({side[member] for member in kept}) == 1


def test_a_proposer_that_nobody_has_answered_for_long_goes_on_alone() -> None:
    view = View(1, ("a", "b", "c"))
    registered = tuple(Registered(id, created) for created, id in enumerate(view.members, 1))
    ledger = LedgerState(view=view, registered=registered, size=3)
    standing = Standing(waited_s=TIMING.abandon_s, roll_call_s=9.0, rolls={"a": Roll(1, (), ("b", "c"), True)})
    assert propose_next("a", ledger, standing, TIMING).view == View(2, ("a",), "not everyone reaches b, c")


def test_at_the_start_nobody_has_state_and_nobody_is_waited_for() -> None:
    view = View(1, ("a", "b", "c"))
    rolls = {
        id: Roll(1, roll.reached, roll.missed, False)
        for id, roll in rolls_of(view.members, {frozenset(("a", "b"))}).items()
    }
    assert next_view("a", view, rolls=rolls, has_state=False).view == View(2, ("a", "c"), "not everyone reaches b")


@given(st.binary(max_size=200))
def test_any_bytes_are_a_roll_or_a_typed_error(data: bytes) -> None:
    try:
        assert isinstance(Roll.decode(data), Roll)
    except ProtocolError:
        pass
