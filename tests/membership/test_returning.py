"""Stories of machines that wait for one that is late, and of the one that was."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.errors import ProtocolError
from holdfast.core.words import View
from holdfast.membership import messages as m
from holdfast.membership.late import SPENT, not_back, patience_s, still_late
from holdfast.membership.machine import Machine, Phase
from holdfast.membership.reach import Roll
from holdfast.membership.view_rules import LedgerState, Registered, Report, Timing, propose_planned, reconcile

MEMBERS = ("w0.1", "w1.1", "w2.1")
SHARDS = {"w0.1": (0, 1), "w1.1": (2, 3), "w2.1": (4, 5)}
PACE_S = 0.02
WITHOUT = View(2, ("w0.1", "w1.1"), "w2.1 is late", (("w2.1", 2),))


class Crew:
    """One machine in a view of three that has been through some steps. What it did last is in `done`."""

    def __init__(self, me: str = "w0.1", *, late_s: float = 0.5, steps: int = 6) -> None:
        self.machine = Machine(me, shards=6, digest="same", two_rounds=False, timing=Timing(late_s=late_s))
        self.now = 100.0
        self.view = View(1, MEMBERS)
        self.done: list[m.Effect] = []
        self.ledger_shows(self.view)
        for peer in self.others:
            self.hears(peer, Report(None, digest="same"))
        for _ in range(steps):
            self.step()

    @property
    def others(self) -> list[str]:
        return [member for member in self.view.members if member != self.machine.me]

    def happens(self, event: m.Event, *, after_s: float = 0.0) -> list[m.Effect]:
        self.now += after_s
        self.done = self.machine.handle(event, self.now)
        return self.done

    def hears(self, peer: str, message: m.Message) -> list[m.Effect]:
        return self.happens(m.Heard(self.view.number, peer, message))

    def ledger_shows(self, view: View, *, gone: str = "", **more: object) -> list[m.Effect]:
        registered = tuple(Registered(id, index) for index, id in enumerate(MEMBERS) if id != gone)
        self.ledger = LedgerState(view, view.number, registered, size=3, **more)  # type: ignore[arg-type]
        return self.happens(m.LedgerSaw(self.ledger))

    def step(self) -> None:
        self.computes()
        for peer in self.others:
            self.is_ready(peer)
        step = self.machine.next
        assert step is not None
        self.happens(m.Reduced(step))
        self.happens(m.Applied(step))

    def computes(self) -> list[m.Effect]:
        assert self.machine.next is not None
        return self.happens(m.Computed(self.machine.next, pace=PACE_S), after_s=0.04)

    def is_ready(self, peer: str) -> list[m.Effect]:
        assert self.machine.next is not None
        return self.hears(peer, m.Ready(self.machine.next, self.machine.shares[peer], pace=PACE_S))

    def proposed(self) -> list[View]:
        return [effect.view for effect in self.done if isinstance(effect, m.Propose)]


def test_who_is_late_is_left_behind_by_the_first_of_the_others() -> None:
    crew = Crew()
    crew.computes()
    crew.is_ready("w1.1")
    crew.happens(m.Tick(), after_s=0.45)
    assert not crew.proposed()
    assert 0.04 < crew.machine.wait_s(crew.now, 0.2) < 0.06
    crew.happens(m.Tick(), after_s=0.06)
    (view,) = crew.proposed()
    assert view == WITHOUT
    crew.ledger_shows(view)
    told = next(effect for effect in crew.done if isinstance(effect, m.LeftBehind))
    assert told.workers == ("w2.1",) and told.step == 6 and told.waited_s >= 0.5
    assert crew.machine.phase is Phase.FORMING


def test_the_others_wait_for_that_and_say_nothing() -> None:
    crew = Crew("w1.1")
    crew.computes()
    crew.is_ready("w0.1")
    crew.happens(m.Tick(), after_s=1.0)
    assert crew.done == [] and crew.machine.wait_s(crew.now, 0.2) == 0.2
    crew.ledger_shows(WITHOUT)  # at once, though it is in the middle of a step
    assert crew.machine.phase is Phase.FORMING and not any(isinstance(one, m.LeftBehind) for one in crew.done)


@pytest.mark.parametrize(
    ("options", "ready", "gone"),
    [
        ({"late_s": 0.0}, ["w1.1"], ""),
        ({"steps": 4}, ["w1.1"], ""),
        ({}, [], ""),  # more would be left behind than go on
        ({}, ["w1.1"], "w0.1"),  # it may be the one that is gone
    ],
    ids=["switched off", "no history", "the many", "unregistered"],
)
def test_nobody_is_left_behind(options: dict[str, float], ready: list[str], gone: str) -> None:
    crew = Crew(**options)  # type: ignore[arg-type]
    crew.computes()
    for peer in ready:
        crew.is_ready(peer)
    if gone:
        crew.ledger_shows(crew.view, gone=gone)
    crew.happens(m.Tick(), after_s=2.0)
    assert not crew.proposed()


def test_news_of_the_ledger_alone_leave_nobody_behind() -> None:
    """I may have been away myself, and what the others said meanwhile is not read yet."""
    crew = Crew()
    crew.computes()
    crew.is_ready("w1.1")
    crew.now += 5.0
    crew.ledger_shows(crew.view)
    assert not crew.proposed()


def test_after_a_long_evaluation_of_my_own_i_wait_as_long_for_others() -> None:
    crew = Crew()
    crew.now += 30.0
    crew.computes()
    crew.is_ready("w1.1")
    crew.happens(m.Tick(), after_s=20.0)
    assert not crew.proposed()
    crew.happens(m.Tick(), after_s=11.0)
    assert crew.proposed()


def test_the_first_two_keep_the_mean_of_the_step_and_of_its_neighbours() -> None:
    crew = Crew()
    crew.computes()
    crew.is_ready("w1.1")
    crew.ledger_shows(WITHOUT)
    crew.view = WITHOUT
    crew.hears("w1.1", Report(6, SHARDS["w1.1"], kept=True))
    keeps = [effect.step for effect in crew.done if isinstance(effect, m.Keep)]
    for _ in range(3):
        crew.computes()
        assert crew.machine.next is not None
        mine = crew.machine.assigned
        theirs = tuple(shard for shard in range(6) if shard not in mine)
        crew.hears("w1.1", m.Ready(crew.machine.next, theirs, pace=PACE_S))
        crew.happens(m.Reduced(crew.machine.next))
        keeps += [effect.step for effect in crew.done if isinstance(effect, m.Keep)]
        crew.happens(m.Applied(crew.machine.next))
    assert keeps == [5, 6, 7]


def left_behind() -> Crew:
    crew = Crew("w2.1")
    crew.ledger_shows(WITHOUT)
    assert crew.machine.phase is Phase.COMPUTING  # the user's lines have the word
    crew.computes()
    return crew


def test_the_late_one_asks_for_the_mean_applies_it_and_joins() -> None:
    crew = left_behind()
    assert crew.done[-1] == m.Catch(6, ("w0.1", "w1.1")) and crew.machine.phase is Phase.BEHIND
    crew.happens(m.Caught(6, found=False))
    assert crew.happens(m.Tick(), after_s=0.2) == [m.Catch(6, ("w0.1", "w1.1"))]
    assert crew.happens(m.Caught(6, found=True)) == [m.Commit(6, received=True)]
    crew.happens(m.Applied(6))
    machine = crew.machine
    assert machine.phase is Phase.WAITING and machine.next is None and machine.digest == SPENT
    knock = next(effect for effect in crew.done if isinstance(effect, m.Knock))
    crew.happens(m.Knocked(knock.number, ("w0.1", "w1.1"), ()))
    assert crew.done == [m.Publish(Roll(2))]
    back = View(3, (*WITHOUT.members, "w2.1"), "w2.1 joined")
    crew.ledger_shows(back)
    crew.view = back
    for peer in WITHOUT.members:
        crew.hears(peer, Report(9, (), kept=True))
    assert crew.done == [m.Fetch(9, WITHOUT.members)]
    crew.happens(m.Loaded(9), after_s=0.1)
    assert crew.done[0] == m.CaughtUp(9, 2, 0.3) and crew.machine.phase is Phase.COMPUTING


def test_at_the_end_of_a_step_it_needs_no_mean() -> None:
    crew = Crew("w2.1", steps=5)
    crew.computes()
    for peer in crew.others:
        crew.is_ready(peer)
    crew.happens(m.Reduced(5))
    crew.ledger_shows(View(2, ("w0.1", "w1.1"), "", (("w2.1", 2),)))
    crew.happens(m.PeerLost(1, "w0.1", "closed"))
    crew.happens(m.Applied(5))
    assert crew.machine.phase is Phase.WAITING and not any(isinstance(effect, m.Catch) for effect in crew.done)


@pytest.mark.parametrize("after_s", [11.0, 0.2])
def test_without_the_mean_it_ends(after_s: float) -> None:
    """Nobody has it any more; or nobody expects it back."""
    crew = left_behind()
    if after_s < 1:
        crew.ledger_shows(View(3, ("w0.1", "w1.1"), "lost w2.1"))
    else:
        crew.happens(m.Tick(), after_s=after_s)
    assert isinstance(crew.done[-1], m.End) and crew.done[-1].kind == "evicted"


def test_it_does_not_go_through_a_step_twice() -> None:
    crew = left_behind()
    crew.happens(m.Caught(6, found=True))
    crew.happens(m.Applied(6))
    crew.view = View(3, (*WITHOUT.members, "w2.1"))
    crew.ledger_shows(crew.view)
    for peer in WITHOUT.members:
        crew.hears(peer, Report(6, (), kept=True))
    assert isinstance(crew.done[-1], m.End) and "has been through step 6" in crew.done[-1].reason


# ---- rules


def ledger(rolls: dict[str, Roll], view: View = WITHOUT) -> LedgerState:
    return LedgerState(view, 2, tuple(Registered(id, index) for index, id in enumerate(MEMBERS)), size=3, rolls=rolls)


@pytest.mark.parametrize(
    ("roll", "back"),
    [
        (None, False),
        (Roll(1), False),
        (Roll(1, missed=("w0.1",)), False),
        (Roll(2, has_state=True), False),
        (Roll(2), True),
        (Roll(7), True),
    ],
)
def test_who_was_left_behind_is_a_joiner_when_it_says_that_it_knows(roll: Roll | None, back: bool) -> None:
    state = ledger({"w2.1": roll} if roll else {})
    assert not_back(state) == (frozenset() if back else {"w2.1"})
    decision = propose_planned("w0.1", state, frozenset())
    assert (decision.view is not None) == back
    if decision.view is not None:
        assert decision.view.members == MEMBERS and decision.view.late == ()


def test_views_name_the_late_until_they_are_members_or_dead() -> None:
    state = ledger({})
    assert still_late(state, WITHOUT.members) == (("w2.1", 2),)
    assert still_late(state, MEMBERS) == ()
    assert still_late(state, ("w0.1",), ["w1.1"]) == (("w2.1", 2), ("w1.1", 3))
    dead = LedgerState(WITHOUT, 2, state.registered, frozenset({"w2.1"}), 3)
    assert still_late(dead, WITHOUT.members) == ()


def test_the_state_of_long_ago_begins_no_run() -> None:
    view = View(5, ("w2.1", "w3.1", "w4.1"))
    reports = {"w2.1": Report(None, digest=SPENT)} | {id: Report(None, digest="same") for id in ("w3.1", "w4.1")}
    plan = reconcile(view, reports, 4)
    assert plan.fetches == {"w2.1": ("w3.1", "w4.1")} and "w2.1" not in plan.assignment
    alone = reconcile(View(5, ("w2.1",)), {"w2.1": Report(None, digest=SPENT)}, 4)
    assert alone.evicted.keys() == {"w2.1"}


@given(st.floats(0.1, 10), st.floats(0, 100), st.floats(0, 100))
def test_patience_is_at_least_each_of_its_reasons(least: float, expected: float, own: float) -> None:
    found = patience_s(least, expected_s=expected, own_s=own)
    assert found >= max(least, expected, own)


@given(
    st.integers(1, 1 << 40),
    st.lists(st.text(min_size=1, max_size=9), unique=True, max_size=4),
    st.dictionaries(st.text(min_size=1, max_size=9), st.integers(1, 1 << 40), max_size=4),
)
def test_a_view_survives_the_ledger(number: int, members: list[str], late: dict[str, int]) -> None:
    view = View(number, tuple(members), "why", tuple(sorted(late.items())))
    found = View.decode(view.encode())
    assert found.members == view.members and dict(found.late) == late


@pytest.mark.parametrize("late", ["5", '["w0.1"]', '{"w0.1":"x"}', '{"w0.1":null}'])
def test_what_is_no_view(late: str) -> None:
    with pytest.raises(ProtocolError):
        View.decode(b'{"number":1,"members":[],"reason":"","late":%s}' % late.encode())
