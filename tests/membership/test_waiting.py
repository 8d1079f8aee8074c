"""What a machine says that it waits for, in every phase, and how long it waits once it was asked to leave."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.core.waits import WaitKind
from holdfast.core.words import View
from holdfast.membership import messages as m
from holdfast.membership.machine import Machine, Phase
from holdfast.membership.view_rules import LedgerState, Registered, Report
from holdfast.membership.waiting import LEAVE_S, left_in_vain, wait_of

MEMBERS = ("w0.1", "w1.1", "w2.1")
LEDGER = LedgerState(View(1, MEMBERS), 1, tuple(Registered(one, at) for at, one in enumerate(MEMBERS)), size=3)


def forming(me: str = "w0.1", *, checkpoints: bool = False, next: int | None = None) -> Machine:
    machine = Machine(me, shards=3, digest="same", checkpoints=checkpoints)
    machine.next = next
    machine.handle(m.LedgerSaw(LEDGER), 1.0)
    return machine


def computing(me: str = "w0.1") -> Machine:
    machine = forming(me, next=7)
    for peer in MEMBERS:
        if peer != me:
            machine.handle(m.Heard(1, peer, Report(7, (), kept=True)), 1.0)
    assert machine.phase is Phase.COMPUTING
    return machine


def words(machine: Machine) -> tuple[WaitKind, str, tuple[str, ...]]:
    wait = wait_of(machine)
    return wait.kind, wait.words, wait.whom


def test_in_every_phase_it_says_for_whom() -> None:
    machine = Machine("w0.1", shards=3)
    assert words(machine)[0] is WaitKind.VIEW
    machine = forming()
    assert words(machine) == (WaitKind.PEERS, "waiting for w1.1, w2.1 to say where they stand in view 1", MEMBERS[1:])
    machine = computing()
    machine.handle(m.Computed(7), 2.0)
    machine.handle(m.Heard(1, "w1.1", m.Ready(7, (1,))), 2.5)
    assert words(machine) == (WaitKind.PEERS, "waiting for w2.1 to be ready in step 7", ("w2.1",))
    assert wait_of(machine).since == 2.5
    machine.handle(m.Heard(1, "w2.1", m.Ready(7, (2,))), 3.0)
    machine.handle(m.Reduced(7), 3.1)
    assert words(machine) == (WaitKind.PEERS, "waiting for w1.1, w2.1 to add up step 7", MEMBERS[1:])
    assert wait_of(machine).place > wait_of(computing()).place


def test_one_looks_for_a_checkpoint_and_the_others_wait_for_it() -> None:
    first, second = forming("w0.1", checkpoints=True), forming("w1.1", checkpoints=True)
    for machine in (first, second):
        for peer in MEMBERS:
            machine.handle(m.Heard(1, peer, Report(None, digest="same")), 1.0)
    assert words(first)[0] is WaitKind.STORAGE
    assert words(second)[::2] == (WaitKind.PEERS, ("w0.1",))


def test_one_that_computes_and_has_nothing_to_compute_waits_for_nothing() -> None:
    assert words(computing()) == (WaitKind.NOTHING, "waiting for nothing that it knows of", ())


def test_after_a_loss_the_first_waits_for_the_view_and_the_others_for_the_first() -> None:
    for me, kind, whom in (("w0.1", WaitKind.VIEW, ()), ("w1.1", WaitKind.PEERS, ("w0.1",))):
        machine = computing(me)
        machine.handle(m.Computed(7), 2.0)
        machine.handle(m.PeerLost(1, "w2.1", "reset"), 2.1)
        assert machine.phase is Phase.BROKEN
        assert words(machine)[::2] == (kind, whom)


def test_while_it_is_found_out_who_can_be_reached_the_wait_has_an_end() -> None:
    machine = computing()
    machine.handle(m.Computed(7), 2.0)
    effects = machine.handle(m.Tick(), 6.0)
    (knock,) = (effect for effect in effects if isinstance(effect, m.Knock))
    assert wait_of(machine).kind is WaitKind.VIEW
    machine.handle(m.Knocked(knock.number, MEMBERS[1:], ()), 6.1)
    assert wait_of(machine).kind is WaitKind.PEERS and wait_of(machine).since == 2.0


@pytest.mark.parametrize("stop", [False, True])
def test_asked_to_leave_it_does_not_wait_in_vain(stop: bool) -> None:
    machine = computing()
    machine.handle(m.Computed(7), 2.0)
    if stop:
        machine.handle(m.LedgerSaw(replace(LEDGER, stop="enough")), 3.0)
    else:
        machine.handle(m.LeaveAsked(), 3.0)
    assert left_in_vain(machine, 3.0, 3.0 + LEAVE_S - 0.1) is None
    end = left_in_vain(machine, 3.0, 3.0 + LEAVE_S + 0.1)
    assert end is not None and end.kind == ("stopped" if stop else "left")
    assert "it was waiting for w1.1, w2.1 to be ready in step 7" in end.reason
    machine.paces = dict.fromkeys(MEMBERS, 10.0)  # a shard takes so long: that is worth waiting for
    assert left_in_vain(machine, 3.0, 20.0) is None
