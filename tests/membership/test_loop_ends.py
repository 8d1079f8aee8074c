"""Loops of a script: which a worker passes, for whom it waits at the end of one, and who saves there."""

from __future__ import annotations

from dataclasses import replace

from holdfast.core.words import View
from holdfast.membership import messages as m
from holdfast.membership.loop_ends import LoopCount, Turn
from holdfast.membership.machine import Machine, Phase
from holdfast.membership.reach import Roll
from holdfast.membership.view_rules import LedgerState, Registered, Report

MEMBERS = ("w0.1", "w1.1", "w2.1", "w3.1")
VIEW = View(2, MEMBERS, "w2.1, w3.1 joined")


def ledger(*ids: str) -> LedgerState:
    return LedgerState(VIEW, 2, tuple(Registered(id, index) for index, id in enumerate(ids)), size=4)


def member(me: str) -> Machine:
    """Of a view at step 20 in which the last two have just come, as far as its own part goes."""
    machine = Machine(me, shards=4, digest="same")
    if me in MEMBERS[:2]:
        machine.next = 20
    machine.handle(m.LedgerSaw(ledger(*MEMBERS)), 1.0)
    for peer in MEMBERS:
        if peer != me:
            report = Report(20, (), kept=True) if peer in MEMBERS[:2] else Report(None, digest="same")
            machine.handle(m.Heard(2, peer, report), 1.0)
    return machine


def test_a_worker_that_comes_later_passes_the_loops_that_are_in_its_state() -> None:
    count = LoopCount(done=2)
    assert count.turn(over=True) is count.turn(over=False) is Turn.PASS
    assert count.leave() and count.turn(over=True) is Turn.PASS
    assert count.leave() and count.turn(over=False) is Turn.STEP and count.turn(over=True) is Turn.END
    assert not count.leave() and count.done == count.passed == 3


def test_a_worker_whose_state_has_fewer_loops_than_it_has_been_through_cannot_go_on() -> None:
    count = LoopCount(done=1, passed=1)
    count.leave()
    count.done = 1  # it was left behind, and the others have gone back
    assert count.turn(over=False) is Turn.AHEAD


def test_who_has_the_state_waits_for_those_that_read_it_until_they_say_that_they_have_it() -> None:
    machine = member("w0.1")
    assert machine.phase is Phase.COMPUTING and machine.readers() == ("w2.1", "w3.1")
    machine.handle(m.Heard(2, "w2.1", m.Fetched(20)), 1.1)
    assert machine.readers() == ("w3.1",)
    machine.handle(m.Heard(2, "w3.1", m.Ready(20, ())), 1.2)
    assert machine.readers() == ()


def test_who_is_lost_or_gone_or_has_given_up_reads_nothing() -> None:
    machine = member("w1.1")
    machine.handle(m.PeerLost(2, "w2.1", "reset"), 1.1)
    assert machine.readers() == ("w3.1",)
    machine.handle(m.LedgerSaw(ledger(*MEMBERS[:3])), 1.2)
    assert machine.readers() == ()
    machine = member("w1.1")
    machine.handle(m.LedgerSaw(replace(ledger(*MEMBERS), rolls={"w2.1": Roll(2), "w3.1": Roll(1)})), 1.2)
    assert machine.readers() == ("w3.1",)


def test_two_that_come_in_one_view_do_not_wait_for_each_other() -> None:
    machine = member("w2.1")
    assert machine.phase is Phase.LOADING
    effects = machine.handle(m.Loaded(20), 1.5)
    assert m.Broadcast(m.Fetched(20)) in effects and machine.phase is Phase.COMPUTING
    assert machine.readers() == ()


def test_who_has_just_come_has_no_part_in_what_is_saved_before_the_next_step() -> None:
    newcomer = member("w2.1")
    newcomer.handle(m.Loaded(20), 1.5)
    machine = member("w0.1")
    assert machine.keepers() == newcomer.keepers() == ("w0.1", "w1.1")
    machine.plan = replace(machine.plan, step=19)  # type: ignore[type-var]
    assert machine.keepers() == MEMBERS
