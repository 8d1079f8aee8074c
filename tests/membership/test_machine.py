"""Stories of one machine: what it does when the ledger is away, when peers are silent, and before it joins."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from holdfast.core.words import View
from holdfast.membership import messages as m
from holdfast.membership.machine import Machine, Phase
from holdfast.membership.reach import Roll
from holdfast.membership.view_rules import LedgerState, Registered, Report, Timing

TIMING = Timing()
Kind = TypeVar("Kind", bound=m.Effect)


class Story:
    """A machine, its clock, and the ledger as it sees it. Everything it did last is in `done`."""

    def __init__(self, me: str = "w0.1", *, members: tuple[str, ...] = ("w0.1", "w1.1"), size: int = 2) -> None:
        self.machine = Machine(me, shards=4, digest="same", two_rounds=False)
        self.now = 100.0
        self.done: list[m.Effect] = []
        self.ledger = LedgerState(size=size)
        self.members = members

    def happens(self, event: m.Event, *, after_s: float = 0.0) -> list[m.Effect]:
        self.now += after_s
        self.done = self.machine.handle(event, self.now)
        return self.done

    def ledger_shows(
        self,
        *ids: str,
        view: View | None = None,
        rolls: dict[str, Roll] | None = None,
        dead: frozenset[str] = frozenset(),
        after_s: float = 0.0,
    ) -> list[m.Effect]:
        registered = tuple(Registered(id, index) for index, id in enumerate(ids))
        view = view or self.ledger.view
        number = view.number if view else 0
        self.ledger = LedgerState(view, number, registered, dead, self.ledger.size, rolls=rolls or {})
        return self.happens(m.LedgerSaw(self.ledger), after_s=after_s)

    def trains(self) -> None:
        """View 1 has formed, and step 0 is under way."""
        view = View(1, self.members)
        self.ledger_shows(*self.members, view=view)
        for peer in self.members:
            if peer != self.machine.me:
                self.happens(m.Heard(1, peer, Report(None, digest="same")))
        assert self.machine.phase is Phase.COMPUTING

    def step(self, *, change: bool = False) -> list[m.Effect]:
        """Up to the commit, with the others' Ready, and what comes after the user's lines."""
        step = self.machine.next
        assert step is not None
        self.happens(m.Computed(step))
        mine = self.did(m.Broadcast).message
        assert isinstance(mine, m.Ready)
        shards = [shard for shard in range(4) if shard not in mine.shards]
        for peer in self.members:
            if peer != self.machine.me:
                self.happens(m.Heard(1, peer, m.Ready(step, tuple(shards), change)))
                shards = []
        self.happens(m.Reduced(step))
        return self.happens(m.Applied(step))

    def did(self, kind: type[Kind]) -> Kind:
        found = [effect for effect in self.done if isinstance(effect, kind)]
        assert len(found) == 1, self.done
        return found[0]

    def did_not(self, kind: type[m.Effect]) -> bool:
        return not any(isinstance(effect, kind) for effect in self.done)


# ---- planned changes


def test_a_joiner_is_proposed_while_the_step_goes_on_and_taken_in_at_its_end() -> None:
    story = Story(size=3)
    story.trains()
    story.ledger_shows("w0.1", "w1.1", "w2.1")
    story.happens(m.Computed(0))
    proposed = story.did(m.Propose).view
    assert proposed == View(2, ("w0.1", "w1.1", "w2.1"), "w2.1 joined")
    ready = story.did(m.Broadcast).message
    assert isinstance(ready, m.Ready) and ready.change
    story.ledger_shows("w0.1", "w1.1", "w2.1", view=proposed)
    assert story.machine.phase is Phase.GATHERING  # the step first
    story.happens(m.Heard(1, "w1.1", m.Ready(0, (2, 3))))
    story.happens(m.Reduced(0))
    story.happens(m.Applied(0))
    assert story.did(m.Open).view == proposed and story.did(m.Drop).view == 1


def test_without_the_ledger_a_joiner_costs_a_moment_once_and_training_goes_on() -> None:
    story = Story(size=3)
    story.trains()
    story.ledger_shows("w0.1", "w1.1", "w2.1")
    story.step()
    assert story.machine.phase is Phase.TURNING and story.did_not(m.Drop)
    story.happens(m.Tick(), after_s=TIMING.turn_s)
    assert story.did(m.Compute).step == 1
    for _ in range(5):  # the ledger says nothing: nobody waits for it again
        story.step()
        assert story.machine.phase is Phase.COMPUTING


def test_who_goes_to_the_next_view_first_is_not_lost() -> None:
    story = Story()
    story.trains()
    story.step(change=True)
    assert story.machine.phase is Phase.TURNING
    story.happens(m.PeerLost(1, "w1.1", "it closed the connection"))
    assert story.machine.phase is Phase.TURNING and story.did_not(m.Drop)
    story.ledger_shows("w0.1", "w1.1", "w2.1", view=View(2, ("w0.1", "w1.1", "w2.1")))
    assert story.did(m.Open).view.number == 2
    assert [effect.peer for effect in story.done if isinstance(effect, m.Drop)] in ([], [""])


def test_who_dies_between_two_steps_is_lost_when_the_next_view_does_not_come() -> None:
    story = Story()
    story.trains()
    story.step(change=True)
    story.happens(m.PeerLost(1, "w1.1", "it closed the connection"))
    assert story.did_not(m.Drop)
    story.happens(m.Tick(), after_s=TIMING.turn_s)
    assert story.did(m.Drop).peer == "w1.1" and story.machine.phase is Phase.BROKEN


def test_the_others_say_that_a_view_is_there_even_if_i_do_not_see_it_yet() -> None:
    story = Story(size=3)
    story.trains()
    story.step(change=True)
    assert story.machine.phase is Phase.TURNING
    story.ledger_shows("w0.1", "w1.1", "w2.1", view=View(2, ("w0.1", "w1.1", "w2.1")))
    assert story.did(m.Open).view.number == 2


def test_a_newer_view_does_not_interrupt_a_step_for_ever() -> None:
    story = Story()
    story.trains()
    story.happens(m.Computed(0))
    story.ledger_shows("w0.1", "w1.1", view=View(2, ("w0.1", "w1.1")))
    assert story.machine.phase is Phase.GATHERING
    story.happens(m.Tick(), after_s=TIMING.linger_s)
    assert story.did(m.Open).view.number == 2


def test_a_dead_worker_that_still_registers_is_not_taken_in() -> None:
    story = Story(size=3)
    story.trains()
    story.ledger_shows("w0.1", "w1.1", "w2.1", dead=frozenset({"w2.1"}))
    story.happens(m.Computed(0))
    assert story.did_not(m.Propose)


# ---- silent peers


def waits_in_vain() -> Story:
    story = Story()
    story.trains()
    story.happens(m.Computed(0))
    story.happens(m.Tick(), after_s=TIMING.silent_s)
    return story


def test_a_silent_peer_is_knocked_at_and_a_busy_one_is_waited_for() -> None:
    story = waits_in_vain()
    knock = story.did(m.Knock)
    assert knock.peers == ("w1.1",)
    story.happens(m.Knocked(knock.number, ("w1.1",), ()), after_s=0.1)
    assert story.machine.phase is Phase.GATHERING and story.did_not(m.Publish)
    story.happens(m.Tick(), after_s=1.0)
    assert story.did_not(m.Knock)
    story.happens(m.Tick(), after_s=TIMING.knock_again_s)
    story.did(m.Knock)


def test_a_peer_that_does_not_answer_is_given_up_when_the_ledger_knows() -> None:
    story = waits_in_vain()
    story.happens(m.Knocked(story.did(m.Knock).number, (), ("w1.1",)), after_s=5.0)
    told = story.did(m.Publish).roll
    assert told == Roll(1, (), ("w1.1",), has_state=True)
    assert story.machine.phase is Phase.GATHERING  # the ledger may be away, and the peer may come back
    story.ledger_shows("w0.1", "w1.1", rolls={"w0.1": told}, after_s=0.1)
    assert story.machine.phase is Phase.BROKEN and story.did(m.Drop).peer == "w1.1"
    theirs = Roll(1, (), ("w0.1",), has_state=True)
    story.ledger_shows("w0.1", "w1.1", rolls={"w0.1": told, "w1.1": theirs}, after_s=TIMING.grace_s)
    assert story.did(m.Propose).view == View(2, ("w0.1",), "not everyone reaches w1.1")


def test_who_has_given_up_the_view_is_not_waited_for() -> None:
    story = Story()
    story.ledger_shows("w0.1", "w1.1", view=View(1, ("w0.1", "w1.1")))
    assert story.machine.phase is Phase.FORMING
    story.ledger_shows("w0.1", "w1.1", rolls={"w1.1": Roll(1, (), ("w0.1",))}, after_s=6.0)
    assert story.machine.phase is Phase.BROKEN


def test_what_was_found_before_the_members_were_last_together_does_not_count() -> None:
    story = Story()
    old = {"w1.1": Roll(1, (), ("w0.1",))}
    story.ledger_shows("w0.1", "w1.1", view=View(2, ("w0.1", "w1.1")), rolls=old)
    story.happens(m.Heard(2, "w1.1", Report(None, digest="same")))
    story.happens(m.Computed(0))
    story.happens(m.PeerLost(2, "w1.1", "reset"))
    assert story.machine.phase is Phase.BROKEN
    story.happens(m.Tick(), after_s=TIMING.grace_s)
    story.happens(m.Knocked(story.did(m.Knock).number, ("w1.1",), ()), after_s=0.1)
    assert story.did(m.Propose).view == View(3, ("w0.1", "w1.1"), "a connection broke")


def test_the_answer_to_an_old_knock_is_not_listened_to() -> None:
    story = waits_in_vain()
    number = story.did(m.Knock).number
    story.happens(m.Knocked(number - 1, (), ("w1.1",)))
    assert story.done == []


# ---- joining


def test_a_joiner_knocks_before_it_registers() -> None:
    story = Story("w2.1")
    story.ledger_shows("w0.1", "w1.1", view=View(1, ("w0.1", "w1.1")))
    knock = story.did(m.Knock)
    assert knock.peers == ("w0.1", "w1.1") and story.did_not(m.Register)
    story.happens(m.Knocked(knock.number, ("w0.1", "w1.1"), ()), after_s=0.01)
    assert story.did(m.Register).while_view is None


def test_a_joiner_that_cannot_reach_a_member_waits_longer_each_time_and_says_why() -> None:
    story = Story("w2.1")
    story.ledger_shows("w0.1", "w1.1", view=View(1, ("w0.1", "w1.1")))
    waits = []
    for _ in range(6):
        story.happens(m.Knocked(story.did(m.Knock).number, ("w0.1",), ("w1.1",)), after_s=TIMING.knock_s)
        assert story.machine.reason == "it cannot reach w1.1, and so it cannot be taken in"
        began = story.now
        while story.did_not(m.Knock):
            assert story.did_not(m.Register)
            story.happens(m.Tick(), after_s=0.25)
        waits.append(story.now - began)
    assert waits == sorted(waits) and waits[0] < 3.0 and waits[-1] == TIMING.knock_again_s_max


def test_the_first_workers_of_a_run_register_at_once() -> None:
    story = Story()
    story.ledger_shows()
    assert story.did(m.Register).while_view is None


def test_a_member_whose_lease_is_gone_registers_again_at_once() -> None:
    story = Story()
    story.trains()
    story.ledger_shows("w1.1")
    assert story.did(m.Register).while_view == story.ledger.view_revision


def test_a_member_that_was_cut_off_registers_only_while_its_view_stands() -> None:
    """It sees that its registration is gone before it sees that the others went on, and its script has the word."""
    story = Story(members=("w0.1", "w1.1", "w2.1"), size=3)
    story.trains()
    story.ledger_shows("w1.1", "w2.1")
    assert story.did(m.Register).while_view == 1  # so the ledger refuses it: there is a second view already
    story.ledger_shows("w1.1", "w2.1", view=View(2, ("w1.1", "w2.1")), after_s=0.1)
    assert story.machine.phase is Phase.COMPUTING and story.did_not(m.Register)
    for _ in range(5):
        story.happens(m.Tick(), after_s=TIMING.propose_again_s)
        assert story.did_not(m.Register)
    story.happens(m.Computed(0))
    story.happens(m.Tick(), after_s=TIMING.linger_s)
    assert story.did(m.End).kind == "evicted" and story.did_not(m.Register)


def test_a_member_that_the_next_view_has_asks_again_with_that_view() -> None:
    """The view was proposed before its lease ran out."""
    story = Story()
    story.trains()
    story.ledger_shows("w1.1")
    assert story.did(m.Register).while_view == 1
    story.ledger_shows("w1.1", view=View(2, ("w0.1", "w1.1")), after_s=TIMING.propose_again_s)
    assert story.machine.phase is Phase.COMPUTING and story.did(m.Register).while_view == 2


def test_who_is_expected_back_registers_whatever_view_stands() -> None:
    story = Story()
    story.trains()
    story.ledger_shows("w1.1", view=View(2, ("w1.1",), "w0.1 is late", (("w0.1", 2),)))
    assert story.machine.phase is Phase.COMPUTING and story.did(m.Register).while_view is None


def test_a_joiner_that_comes_as_the_others_finish_does_not_start_anew() -> None:
    story = Story("w2.1", size=3)
    story.ledger_shows("w0.1", "w1.1", "w2.1", "w3.1", view=View(1, ("w0.1", "w2.1")))
    assert story.machine.phase is Phase.FORMING
    finished = replace(story.ledger, dead=frozenset({"w0.1"}), done=True)
    story.happens(m.LedgerSaw(finished), after_s=TIMING.grace_s)
    assert story.did(m.End).kind == "done" and story.did_not(m.Propose)


# ---- who is not taken in again


def left_out(slot: str, *, formed: bool) -> Story:
    """w0.1 and w1.1 train; w2 was in the view, took part or not, and is left out, though it lives."""
    story = Story(members=("w0.1", "w1.1"), size=3)
    story.trains()
    story.happens(m.PeerLost(1, "w1.1", "reset"))
    story.happens(m.Computed(0))
    story.ledger_shows("w0.1", "w1.1", slot, view=View(2, ("w0.1", "w1.1", slot)))
    reports = {"w1.1": Report(0, (2, 3)), slot: Report(None, digest="same")} if formed else {}
    for peer, report in reports.items():
        story.happens(m.Heard(2, peer, report))
    story.happens(m.PeerLost(2, slot, "silent"))
    if formed:
        story.happens(m.Computed(0))
    story.ledger_shows("w0.1", "w1.1", slot, view=View(3, ("w0.1", "w1.1")))
    story.happens(m.Heard(3, "w1.1", Report(0, (2, 3))))
    assert story.machine.phase is Phase.COMPUTING
    return story


def proposes(story: Story, *, after_s: float = 0.0) -> tuple[str, ...]:
    planned = story.machine._planned(story.now + after_s)
    return planned.members if planned else ()


def test_a_joiner_that_could_not_be_reached_rests_with_its_slot() -> None:
    story = left_out("w2.1", formed=False)
    assert proposes(story) == ()
    story.ledger_shows("w0.1", "w1.1", "w2.2")  # its replacement
    assert proposes(story) == ()
    assert proposes(story, after_s=TIMING.rest_s + 0.1) == ("w0.1", "w1.1", "w2.2")
    story.ledger_shows("w0.1", "w1.1", "w3.1")  # another slot
    assert proposes(story) == ("w0.1", "w1.1", "w3.1")


def test_who_took_part_and_was_left_out_never_comes_back_under_its_name() -> None:
    story = left_out("w2.1", formed=True)
    assert proposes(story, after_s=10_000.0) == ()
    story.ledger_shows("w0.1", "w1.1", "w2.2")
    assert proposes(story) == ("w0.1", "w1.1", "w2.2")


def test_a_newcomer_is_told_who_was_left_out_before_it_came() -> None:
    """The one that was left out may wake up and register again before it sees that it is out."""
    story = left_out("w2.1", formed=True)
    newcomer = Story("w3.1", size=3)
    newcomer.ledger_shows("w0.1", "w3.1", view=View(4, ("w0.1", "w3.1")))
    story.happens(m.PeerLost(3, "w1.1", "closed"))
    story.happens(m.Computed(0))
    story.ledger_shows("w0.1", "w3.1", view=View(4, ("w0.1", "w3.1")))
    report = story.did(m.Broadcast).message
    assert isinstance(report, Report) and "w2.1" in report.former
    newcomer.happens(m.Heard(4, "w0.1", report))
    newcomer.happens(m.Loaded(0))
    newcomer.ledger_shows("w3.1", "w2.1")
    assert proposes(newcomer) == ("w3.1",)
    newcomer.ledger_shows("w3.1", "w2.1", "w2.2")
    assert proposes(newcomer) == ("w3.1", "w2.2")
