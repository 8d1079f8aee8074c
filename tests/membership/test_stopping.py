"""Stories of one machine whose script wants to stop: it does so only where all of a view want that, before one step."""

from __future__ import annotations

import pytest

from holdfast.core.words import View
from holdfast.membership import messages as m
from holdfast.membership.codec import decode, encode
from holdfast.membership.machine import Phase
from holdfast.membership.stopping import NO_WISH, StopWishes
from holdfast.membership.view_rules import Plan, Report
from holdfast.membership.waiting import wait_of
from holdfast.net.framing import LENGTH
from tests.membership.test_machine import Story

THREE = ("w0.1", "w1.1", "w2.1")


def asked(members: tuple[str, ...] = ("w0.1", "w1.1")) -> Story:
    """Its script has called run.stop in the lines of step 0, and its loop refuses step 1."""
    story = Story(members=members, size=len(members))
    story.trains()
    story.happens(m.Computed(0))
    for peer in members[1:]:
        story.happens(m.Heard(1, peer, m.Ready(0, story.machine.shares[peer])))
    story.happens(m.Reduced(0))
    story.happens(m.StopAsked(1, "enough"))
    assert story.did(m.Broadcast).message == m.Over(1, "enough")
    story.happens(m.Applied(0))
    story.happens(m.StepRefused(1))
    return story


def test_alone_it_stops_at_once() -> None:
    story = Story(members=("w0.1",), size=1)
    story.trains()
    story.happens(m.StopAsked(0, "enough"))
    story.happens(m.StepRefused(0))
    assert story.did(m.Halt) == m.Halt(0, "enough") and story.machine.phase is Phase.COMPUTING


def test_all_stop_before_the_step_and_take_the_first_members_reason() -> None:
    story = asked(THREE)
    assert story.machine.phase is Phase.STOPPING and story.did_not(m.Halt)
    story.happens(m.Heard(1, "w1.1", m.Over(1, "theirs")))
    assert story.did_not(m.Halt) and "w2.1 to say whether to stop before step 1" in wait_of(story.machine).why
    story.happens(m.Heard(1, "w2.1", m.Over(1, "theirs")))
    assert story.did(m.Halt) == m.Halt(1, "enough")


def test_one_that_has_gone_on_takes_all_through_the_step() -> None:
    story = asked(THREE)
    story.happens(m.Heard(1, "w1.1", m.Over(1, "theirs")))
    story.happens(m.Heard(1, "w2.1", m.Ready(1, (3,))))
    assert story.did(m.Compute).step == 1 and story.did_not(m.Halt)
    assert (
        story.machine.stopping.wishes.own == NO_WISH
    )  # in a view without the one that went on it does not stop before this step


def test_nobody_stops_without_a_member_that_is_lost() -> None:
    """It may have gone on, and the next view may have it."""
    story = asked(THREE)
    story.happens(m.Heard(1, "w1.1", m.Over(1, "theirs")))
    story.happens(m.PeerLost(1, "w2.1", "reset"))
    assert story.machine.phase is Phase.BROKEN and story.did_not(m.Halt)


def test_a_view_of_those_who_are_left_is_asked_anew() -> None:
    story = asked(THREE)
    story.happens(m.PeerLost(1, "w2.1", "reset"))
    story.ledger_shows("w0.1", "w1.1", view=View(2, ("w0.1", "w1.1")))
    report = story.did(m.Broadcast).message
    assert isinstance(report, Report) and report.over == "enough"
    story.happens(m.Heard(2, "w1.1", Report(1, kept=True, over="theirs")))
    assert story.did(m.Compute).step == 1
    story.happens(m.StepRefused(1))
    assert story.did(m.Halt) == m.Halt(1, "enough") and story.did_not(m.Broadcast)  # the reports have said it


def test_one_that_is_given_the_mean_is_waited_for() -> None:
    story = asked(THREE)
    story.happens(m.PeerLost(1, "w2.1", "reset"))
    story.ledger_shows("w0.1", "w1.1", view=View(2, ("w0.1", "w1.1")))
    story.happens(m.Heard(2, "w1.1", Report(0, (2, 3))))
    story.happens(m.StepRefused(1))
    assert story.machine.phase is Phase.STOPPING
    story.happens(m.Heard(2, "w1.1", m.Over(1, "theirs")))
    assert story.did(m.Halt)


def test_what_was_said_in_another_view_does_not_count() -> None:
    story = asked()
    story.happens(m.PeerLost(1, "w1.1", "reset"))
    story.ledger_shows("w0.1", "w1.1", view=View(2, ("w0.1", "w1.1")))
    story.happens(m.Heard(1, "w1.1", m.Over(1, "theirs")))
    story.happens(m.Heard(2, "w1.1", Report(1, kept=True)))
    story.happens(m.StepRefused(1))
    assert story.machine.phase is Phase.STOPPING and story.did_not(m.Halt)


@pytest.mark.parametrize(("second", "wish"), [("too", (4, "mine")), ("", NO_WISH)])
def test_whoever_is_given_the_state_is_given_the_wish_of_all_who_have_it(second: str, wish: tuple[int, str]) -> None:
    members = ("w0.1", "w1.1", "w2.1", "w3.1")
    reports = {"w0.1": Report(4, over="mine"), "w1.1": Report(4, over=second), "w2.1": Report(3), "w3.1": Report(None)}
    plan = Plan(4, {}, gives={"w2.1": "w0.1"}, fetches={"w3.1": ("w0.1", "w1.1")})
    joiner, member = StopWishes(own=(4, "of an earlier view")), StopWishes()
    joiner.planned("w3.1", plan, members, reports)
    member.planned("w0.1", plan, members, reports)
    assert joiner.own == wish and member.own == NO_WISH  # each keeps its own
    assert ("w3.1" in member.unheard(4, members)) is not bool(second)
    assert not member.agreed(4, members)  # the one that is given the mean has not been at its lines
    member.heard("w2.1", 4, "late")
    assert bool(member.agreed(4, members)) is bool(second)


def test_a_wish_travels() -> None:
    for message in (m.Over(7, "val_loss rises"), Report(7, (1,), True, over="val_loss rises")):
        assert decode(encode(message)[LENGTH.size :])[0] == message
