"""A joiner is offered states that differ: do the members compare at once, and is nobody replaced for it?"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import pytest

from holdfast.core.words import View
from holdfast.membership import messages as m
from holdfast.membership.auditing import AuditRules, Said
from holdfast.membership.machine import Machine, Phase
from holdfast.membership.suspecting import PARAMETER, TENSOR, Details, StateEntry
from holdfast.membership.view_rules import LedgerState, Registered, Report
from holdfast.membership.waiting import wait_of

MEMBERS = ("w0.1", "w1.1", "w2.1")
JOINER = "w2.1"
STEP = 7  # nothing is due in it
SELDOM = AuditRules(every=1000)
Kind = TypeVar("Kind", bound=m.Effect)


class Story:
    """One machine of three members, the last of which comes without state. What it did last is in `done`."""

    def __init__(self, me: str, rules: AuditRules = SELDOM) -> None:
        self.machine = Machine(me, shards=4, digest="same", two_rounds=False, rules=rules)
        self.now = 100.0
        self.done: list[m.Effect] = []
        if me != JOINER:
            self.machine.next = STEP

    def happens(self, event: m.Event) -> list[m.Effect]:
        self.now += 1.0
        self.done = self.machine.handle(event, self.now)
        return self.done

    def view(self, number: int, **reports: Report) -> list[m.Effect]:
        """A view of all three forms; `reports` of the others, by their slot. What the last of them has led to."""
        registered = tuple(Registered(member, index) for index, member in enumerate(MEMBERS))
        self.happens(m.LedgerSaw(LedgerState(View(number, MEMBERS), number, registered, frozenset(), 3)))
        mine = next(effect.message for effect in self.done if isinstance(effect, m.Broadcast))
        assert isinstance(mine, Report)
        self.report = mine
        for slot, report in reports.items():
            self.happens(m.Heard(number, f"{slot}.1", report))
        return self.done

    def ready(self, view: int, member: str, state: str, details: Details | None = None) -> list[m.Effect]:
        shards = (0, 1) if member == "w0.1" else (2, 3)
        said = Said(state=state, details=details)
        if member == self.machine.me:
            return self.happens(m.Computed(STEP, said=said))
        return self.happens(m.Heard(view, member, m.Ready(STEP, shards, said=said)))

    def did(self, kind: type[Kind]) -> Kind:
        found = [effect for effect in self.done if isinstance(effect, kind)]
        assert len(found) == 1, self.done
        return found[0]

    def did_not(self, *kinds: type[m.Effect]) -> bool:
        return not any(isinstance(effect, kinds) for effect in self.done)


HAS_IT, HAS_NONE = Report(STEP), Report(None, digest="same")
DOUBTS = replace(HAS_NONE, doubt=True)


def doubting_joiner() -> Story:
    story = Story(JOINER)
    story.view(1, w0=HAS_IT, w1=HAS_IT)
    assert story.did(m.Fetch).sources == ("w0.1", "w1.1") and not story.report.doubt
    story.happens(m.SourcesDiffer(STEP))
    return story


def member(me: str = "w0.1") -> Story:
    """In a view in which the joiner says that it doubts."""
    story = Story(me)
    others = {"w1": HAS_IT} if me == "w0.1" else {"w0": HAS_IT}
    story.view(1, **others, w2=DOUBTS)
    return story


def test_a_joiner_that_is_offered_states_that_differ_stays_and_says_so() -> None:
    story = doubting_joiner()
    assert story.machine.phase is Phase.BROKEN and story.did(m.Drop).view == 1 and story.did_not(m.End)
    story.view(2, w0=HAS_IT, w1=HAS_IT)
    assert story.report.doubt and story.machine.phase is Phase.COMPARING and story.did_not(m.Fetch)
    assert wait_of(story.machine).why == f"for w0.1, w1.1 to compare the state of step {STEP}"


def test_those_who_have_the_state_compare_all_of_it_before_anybody_fetches() -> None:
    story = member()
    assert story.did(m.Compute).step == STEP and story.did_not(m.Serve)
    assert story.machine.audits.doubted == STEP and not story.machine.readers()
    story.ready(1, "w0.1", "a")
    assert wait_of(story.machine).why == f"for w1.1 to be ready in step {STEP}"  # not for the joiner
    story.ready(1, "w1.1", "b")
    assert story.did(m.Accuse).finding.narrow and story.machine.phase is Phase.BROKEN and story.did_not(m.Reduce)


def doubted(me: str) -> Story:
    """In the next view the joiner says that it doubts."""
    return doubting_joiner() if me == JOINER else Story(me)


def others_of(me: str, *, doubt: bool) -> dict[str, Report]:
    """What the others report: before they know of the doubt, or afterwards."""
    found = {"w0.1": replace(HAS_IT, doubt=doubt), "w1.1": replace(HAS_IT, doubt=doubt), JOINER: DOUBTS}
    return {who.partition(".")[0]: report for who, report in found.items() if who != me}


def entries(bits: str) -> Details:
    return Details(tuple(StateEntry(f"the parameter {name}", PARAMETER, TENSOR, f"(3,) {bits}") for name in "abc"))


@pytest.mark.parametrize("me", MEMBERS)
def test_who_differs_in_many_tensors_has_a_mistake_in_the_script(me: str) -> None:
    """All three come to the same end, the joiner too: one view in which digests are compared, one with entries."""
    story = doubted(me)
    story.view(2, **others_of(me, doubt=False))
    story.ready(2, "w0.1", "a")
    story.ready(2, "w1.1", "b")
    assert story.did(m.Accuse).finding.narrow and story.machine.phase is Phase.BROKEN
    story.view(3, **others_of(me, doubt=True))
    assert story.report.doubt
    story.ready(3, "w0.1", "a", entries("00"))
    story.ready(3, "w1.1", "b", entries("01"))
    end = story.did(m.End)
    assert end.kind == "script" and "workers differ in the parameter a (" in end.reason


@pytest.mark.parametrize("me", MEMBERS)
def test_when_all_agree_the_joiner_fetches(me: str) -> None:
    story = doubted(me)
    story.view(2, **others_of(me, doubt=False))
    story.ready(2, "w0.1", "a")
    story.ready(2, "w1.1", "a")
    assert story.machine.phase is Phase.BROKEN and story.did_not(m.Accuse, m.Reduce, m.End)
    story.view(3, **{slot: replace(report, doubt=False) for slot, report in others_of(me, doubt=False).items()})
    assert not story.report.doubt
    assert story.did(m.Fetch if me == JOINER else m.Serve).step == STEP


def test_who_doubts_in_vain_and_doubts_again_is_replaced() -> None:
    """Another process may have more luck: the members are of one mind."""
    story = doubting_joiner()
    story.view(2, w0=HAS_IT, w1=HAS_IT)
    story.ready(2, "w0.1", "a")
    story.ready(2, "w1.1", "a")
    story.view(3, w0=HAS_IT, w1=HAS_IT)
    story.happens(m.SourcesDiffer(STEP))
    assert story.did(m.End).kind == "evicted"


def test_where_nobody_compares_states_the_joiner_takes_the_first() -> None:
    story = Story(JOINER, AuditRules())
    story.view(1, w0=HAS_IT, w1=HAS_IT)
    story.happens(m.SourcesDiffer(STEP))
    assert story.did(m.Fetch) == m.Fetch(STEP, ("w0.1",)) and story.machine.phase is Phase.LOADING


def test_with_one_that_has_the_state_there_is_nothing_to_compare() -> None:
    story = Story("w0.1")
    story.view(1, w1=HAS_NONE, w2=DOUBTS)
    assert story.did(m.Serve).to == ("w1.1", "w2.1") and story.machine.audits.doubted == -1
    assert not story.machine.doubt.stands


def test_the_comparison_does_not_need_the_one_that_doubted() -> None:
    story = member()
    story.ready(1, "w0.1", "a")
    story.happens(m.PeerLost(1, JOINER, "it died"))
    assert story.machine.phase is Phase.GATHERING
    story.ready(1, "w1.1", "b")
    assert story.did(m.Accuse).finding.narrow


def test_a_doubt_lives_on_when_the_one_that_had_it_dies() -> None:
    story = member()
    story.ready(1, "w0.1", "a")
    story.ready(1, "w1.1", "b")
    registered = tuple(Registered(one, index) for index, one in enumerate(MEMBERS[:2]))
    story.happens(m.LedgerSaw(LedgerState(View(2, MEMBERS[:2]), 2, registered, frozenset({JOINER}), 3)))
    mine = story.did(m.Broadcast).message
    assert isinstance(mine, Report) and mine.doubt
    story.happens(m.Heard(2, "w1.1", HAS_IT))
    assert story.machine.audits.doubted == STEP
    story.ready(2, "w0.1", "a", entries("00"))
    story.ready(2, "w1.1", "b", entries("01"))
    assert story.did(m.End).kind == "script"


def test_with_nobody_left_who_needs_it_and_all_of_one_mind_the_step_goes_on() -> None:
    story = Story("w0.1")
    registered = tuple(Registered(one, index) for index, one in enumerate(MEMBERS[:2]))
    story.happens(m.LedgerSaw(LedgerState(View(2, MEMBERS[:2]), 2, registered, frozenset({JOINER}), 3)))
    story.happens(m.Heard(2, "w1.1", replace(HAS_IT, doubt=True)))
    story.ready(2, "w0.1", "a")
    story.ready(2, "w1.1", "a")
    assert story.did(m.Reduce).step == STEP and not story.machine.doubt.stands


def test_a_word_that_comes_too_late_changes_nothing() -> None:
    story = Story(JOINER)
    story.view(1, w0=HAS_IT, w1=HAS_IT)
    story.happens(m.Loaded(STEP))
    assert story.happens(m.SourcesDiffer(STEP)) == [] and story.machine.phase is Phase.COMPUTING
