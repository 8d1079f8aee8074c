"""Who is left out when not everybody reaches everybody: the fewest, newcomers first, and never the training's state."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.errors import ProtocolError
from holdfast.core.words import View
from holdfast.membership.reach import Roll, separate, severed
from holdfast.membership.view_rules import Decision, LedgerState, Registered, Standing, Timing, propose_next

TIMING = Timing()
FLEET = ("w0.1@a", "w0.1@b", "w0.1@c", "w1.1@a", "w1.1@b", "w1.1@c")


def roll(me: str, members: tuple[str, ...], *missed: str, view: int = 1, has_state: bool = True) -> Roll:
    reached = tuple(member for member in members if member != me and member not in missed)
    return Roll(view, reached, missed, has_state)


def on(*hosts: str) -> tuple[str, ...]:
    return tuple(member for member in FLEET if member[-1] in hosts)


def decide(me: str, members: tuple[str, ...], rolls: dict[str, Roll], **standing: object) -> Decision:
    registered = tuple(Registered(id, index) for index, id in enumerate(members))
    ledger = LedgerState(View(1, members), 1, registered, size=len(members))
    facts = {"waited_s": 6.0, "roll_call_s": 3.0, "rolls": rolls, **standing}
    return propose_next(me, ledger, Standing(**facts), TIMING)  # type: ignore[arg-type]


# ---- who cannot be connected


def test_the_one_that_dials_is_the_one_to_ask() -> None:
    says_no = {"y": Roll(1, (), ("x",)), "x": Roll(1, ("y",), ())}
    assert severed(("x", "y"), says_no) == {("x", "y")}  # y dials x, and cannot
    assert severed(("y", "x"), says_no) == frozenset()  # the other way round it can
    assert severed(("x", "y"), {"x": Roll(1, (), ("y",))}) == {("x", "y")}  # nothing else is known


def test_a_newer_word_counts_more() -> None:
    assert severed(("x", "y"), {"y": Roll(4, (), ("x",)), "x": Roll(5, ("y",), ())}) == frozenset()


def test_what_is_known_of_two_hosts_holds_for_all_their_workers() -> None:
    one = {"w0.1@b": Roll(1, ("w1.1@b",), ("w0.1@a",))}
    pairs = severed(on("a", "b"), one)
    assert pairs == {pair for pair in combinations(on("a", "b"), 2) if pair[0][-1] != pair[1][-1]}


def test_unless_another_pair_says_the_opposite() -> None:
    rolls = {"w0.1@b": Roll(1, (), ("w0.1@a",)), "w1.1@b": Roll(1, ("w1.1@a",), ())}
    assert severed(on("a", "b"), rolls) == {("w0.1@a", "w0.1@b")}


def test_on_one_host_nothing_is_concluded_about_the_others() -> None:
    assert severed(("w0.1", "w1.1", "w2.1"), {"w2.1": Roll(1, (), ("w0.1",))}) == {("w0.1", "w2.1")}


# ---- who is left out


def test_the_one_in_most_pairs_goes_first_and_the_later_where_that_is_equal() -> None:
    assert separate(("a", "b", "c"), {("a", "b"), ("b", "c")}, frozenset()) == ("b",)
    assert separate(("a", "b"), {("a", "b")}, frozenset()) == ("b",)


def test_newcomers_go_before_those_who_were_there() -> None:
    pairs = {("a", "x"), ("a", "y"), ("a", "z")}
    assert separate(("a", "b", "x", "y", "z"), pairs, frozenset("xyz")) == ("x", "y", "z")


@given(st.lists(st.integers(0, 3), min_size=2, max_size=9), st.data())
def test_nobody_who_is_left_misses_another_and_nobody_is_left_out_for_nothing(
    sides: list[int], data: st.DataObject
) -> None:
    members = tuple(f"m{index}" for index in range(len(sides)))
    every = list(combinations(members, 2))
    pairs = data.draw(st.sets(st.sampled_from(every)))
    newcomers = data.draw(st.frozensets(st.sampled_from(members)))
    out = separate(members, pairs, newcomers)
    kept = [member for member in members if member not in out]
    assert kept
    assert not any(pair in pairs for pair in combinations(kept, 2))
    for member in out:
        others = [other for other in kept if (other, member) in pairs or (member, other) in pairs]
        assert others, f"{member} misses nobody who is left"


@given(st.lists(st.integers(0, 3), min_size=2, max_size=9))
def test_of_a_network_in_parts_the_largest_part_is_left(sides: list[int]) -> None:
    members = tuple(f"m{index}" for index in range(len(sides)))
    side = dict(zip(members, sides, strict=True))
    pairs = {pair for pair in combinations(members, 2) if side[pair[0]] != side[pair[1]]}
    kept = [member for member in members if member not in separate(members, pairs, frozenset())]
    assert len(kept) == max(sides.count(number) for number in set(sides))
    assert len({side[member] for member in kept}) == 1


# ---- what is proposed


def test_nobody_is_left_out_before_the_others_had_time_to_say_whom_they_reach() -> None:
    rolls = {"a": roll("a", ("a", "b", "c"), "b")}
    assert decide("a", ("a", "b", "c"), rolls, roll_call_s=0.5).reason == "waiting for b to say whom it reaches"
    view = decide("a", ("a", "b", "c"), rolls).view
    assert view == View(2, ("a", "c"), "not everyone reaches b")


def test_a_member_tries_whom_it_reaches_before_the_same_members_are_proposed_again() -> None:
    assert decide("a", ("a", "b"), {}, knocked=False).reason == "knocking at the other members"
    assert decide("a", ("a", "b"), {}).view == View(2, ("a", "b"), "a connection broke")


def test_a_proposer_that_is_cut_off_lets_the_others_go_on() -> None:
    cut = {me: roll(me, FLEET, *on("a")) for me in on("b", "c")} | {
        me: roll(me, FLEET, *on("b", "c")) for me in on("a")
    }
    view = decide("w0.1@a", FLEET, cut).view
    assert view is not None and view.members == on("b", "c")


def test_but_not_before_one_of_them_has_said_that_it_has_the_state() -> None:
    mine = {"w0.1@a": roll("w0.1@a", FLEET, *on("b", "c"))}
    decision = decide("w0.1@a", FLEET, mine)
    assert decision.view is None and "waiting for one of the others" in decision.reason
    told = {**mine, "w0.1@b": roll("w0.1@b", FLEET, *on("a"))}
    assert decide("w0.1@a", FLEET, told).view == View(2, on("b", "c"), "not everyone reaches w0.1@a, w1.1@a")
    alone = decide("w0.1@a", FLEET, mine, waited_s=61.0).view
    assert alone is not None and alone.members == on("a")


def test_who_has_no_state_goes_before_who_has() -> None:
    members = ("a", "x", "y")
    rolls = {me: roll(me, members, "a", has_state=False) for me in ("x", "y")} | {"a": roll("a", members, "x", "y")}
    assert decide("a", members, rolls).view == View(2, ("a",), "not everyone reaches x, y")


def test_at_the_start_nobody_has_state_and_nobody_is_waited_for() -> None:
    rolls = {me: roll(me, ("a", "b", "c"), *({"a", "b", "c"} - {me, "c"}), has_state=False) for me in "abc"}
    rolls["c"] = roll("c", ("a", "b", "c"), has_state=False)
    view = decide("a", ("a", "b", "c"), rolls, has_state=False).view
    assert view == View(2, ("a", "c"), "not everyone reaches b")


def test_without_state_whoever_may_have_it_is_not_left_out() -> None:
    rolls = {"a": roll("a", ("a", "b"), "b", has_state=False)}
    decision = decide("a", ("a", "b"), rolls, has_state=False)
    assert decision.view is None and "may have the state" in decision.reason


# ---- what is in the ledger


@given(
    st.builds(
        Roll,
        st.integers(0, 1 << 40),
        st.lists(st.text(), max_size=5).map(tuple),
        st.lists(st.text(), max_size=5).map(tuple),
        st.booleans(),
    )
)
def test_a_roll_is_what_was_written(written: Roll) -> None:
    assert Roll.decode(written.encode()) == written


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b'{"view":"1","reached":[],"missed":[],"has_state":true}',
        b'{"view":1,"reached":[1],"missed":[],"has_state":true}',
        b'{"view":1,"reached":[],"missed":"x","has_state":true}',
        b'{"view":1,"reached":[],"missed":[]}',
    ],
)
def test_what_is_no_roll_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        Roll.decode(data)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_roll_or_refused(data: bytes) -> None:
    try:
        assert isinstance(Roll.decode(data), Roll)
    except ProtocolError:
        pass
