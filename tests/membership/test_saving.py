"""Stories of one machine around checkpoints: when all save, who looks for one, who must not go without."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.core.errors import ProtocolError
from holdfast.core.words import View
from holdfast.membership import messages as m
from holdfast.membership.codec import decode, encode
from holdfast.membership.machine import Machine, Phase
from holdfast.membership.view_rules import LedgerState, Registered, Report
from holdfast.membership.whereabouts import Whereabouts
from holdfast.net.framing import LENGTH

MEMBERS = ("w0.1", "w1.1")
NOW = 100.0


def kinds(effects: list[m.Effect]) -> list[type]:
    return [type(effect) for effect in effects]


def entered(me: str, *, checkpoints: bool = True) -> tuple[Machine, list[m.Effect]]:
    """In view 1, and the other has told that it has no state either."""
    machine = Machine(me, shards=4, digest="same", two_rounds=False, checkpoints=checkpoints)
    registered = tuple(Registered(id, index) for index, id in enumerate(MEMBERS))
    machine.handle(m.LedgerSaw(LedgerState(View(1, MEMBERS), 1, registered, size=2)), NOW)
    other = next(member for member in MEMBERS if member != me)
    return machine, machine.handle(m.Heard(1, other, Report(None, digest="same")), NOW)


def trains(me: str = "w0.1") -> Machine:
    machine, _ = entered(me)
    if me == MEMBERS[0]:
        machine.handle(m.Restored(None), NOW)
    else:
        machine.handle(m.Heard(1, MEMBERS[0], Report(None, digest="same", searched=True)), NOW)
    assert machine.phase is Phase.COMPUTING
    return machine


def step(machine: Machine, *, mine: m.Computed, theirs: m.Ready) -> list[m.Effect]:
    """One step, in which the other brings shards 2 and 3."""
    machine.handle(mine, NOW)
    machine.handle(m.Heard(1, "w1.1", theirs), NOW)
    machine.handle(m.Reduced(mine.step), NOW)
    assert machine.phase is Phase.APPLYING
    return machine.handle(m.Applied(mine.step), NOW)


def test_without_checkpoints_nobody_searches() -> None:
    machine, effects = entered("w0.1", checkpoints=False)
    assert m.Restore not in kinds(effects) and machine.phase is Phase.COMPUTING


def test_the_first_member_searches_and_the_others_wait_for_its_word() -> None:
    first, effects = entered("w0.1")
    assert kinds(effects) == [m.Restore] and first.searching
    second, effects = entered("w1.1")
    assert effects == [] and second.phase is Phase.FORMING and "w0.1" in second.reason


def test_what_was_found_is_told_and_fetched_from_memory() -> None:
    first, _ = entered("w0.1")
    effects = first.handle(m.Restored(120), NOW)
    told = next(effect.message for effect in effects if isinstance(effect, m.Broadcast))
    assert isinstance(told, Report) and told.next == 120
    assert m.Serve(120, ("w1.1",)) in effects and first.next == 120
    second, _ = entered("w1.1")
    assert second.handle(m.Heard(1, "w0.1", told), NOW) == [m.Fetch(120, ("w0.1",))]


def test_nothing_found_is_a_new_beginning_for_all() -> None:
    assert trains("w0.1").next == 0
    assert trains("w1.1").next == 0


def test_a_view_that_comes_during_the_search_is_told_what_it_found() -> None:
    machine, _ = entered("w0.1")
    registered = (Registered("w0.1", 0), Registered("w2.1", 2))
    machine.handle(m.LedgerSaw(LedgerState(View(2, ("w0.1", "w2.1")), 2, registered, size=2)), NOW)
    assert not machine.searching
    assert machine.handle(m.Restored(7), NOW) == [] and machine.next == 7


def test_an_old_search_is_not_believed() -> None:
    """There was no checkpoint for view 1. By view 2 others may have trained, saved and died."""
    machine, _ = entered("w0.1")
    machine.handle(m.PeerLost(1, "w1.1", "gone"), NOW)
    machine.handle(m.Restored(None), NOW)
    registered = (Registered("w0.1", 0), Registered("w2.1", 2))
    machine.handle(m.LedgerSaw(LedgerState(View(2, ("w0.1", "w2.1")), 2, registered, size=2)), NOW)
    assert kinds(machine.handle(m.Heard(2, "w2.1", Report(None, digest="same")), NOW)) == [m.Restore]


def test_all_save_when_one_says_that_it_is_due() -> None:
    machine = trains()
    effects = step(machine, mine=m.Computed(0), theirs=m.Ready(0, (2, 3), save=True))
    assert effects[0] == m.Save(1, MEMBERS)
    effects = step(machine, mine=m.Computed(1), theirs=m.Ready(1, (2, 3)))
    assert m.Save not in kinds(effects)


def test_nobody_saves_while_one_is_still_at_it() -> None:
    effects = step(trains(), mine=m.Computed(0, save=True), theirs=m.Ready(0, (2, 3), saving=True))
    assert m.Save not in kinds(effects)


@pytest.mark.parametrize("all_leave", [True, False])
def test_who_leaves_last_saves(all_leave: bool) -> None:
    machine = trains()
    machine.handle(m.LeaveAsked(), NOW)
    effects = step(machine, mine=m.Computed(0), theirs=m.Ready(0, (2, 3), leaving=all_leave))
    assert effects[-1] == m.End("left", "asked to leave", save=all_leave)


def test_a_run_that_stops_is_saved() -> None:
    effects = step(trains(), mine=m.Computed(0), theirs=m.Ready(0, (2, 3), stop="enough"))
    assert effects[-1] == m.End("stopped", "enough", save=True)


def test_who_leaves_without_a_group_cannot_know_whether_others_stay() -> None:
    machine = trains()
    step(machine, mine=m.Computed(0), theirs=m.Ready(0, (2, 3)))
    machine.handle(m.Computed(1), NOW)
    machine.handle(m.PeerLost(1, "w1.1", "gone"), NOW)
    assert machine.phase is Phase.BROKEN
    assert machine.handle(m.LeaveAsked(), NOW)[-1] == m.End("left", "asked to leave", save=True)


@pytest.mark.parametrize(
    "message",
    [
        m.Ready(3, (0, 1), save=True),
        m.Ready(3, (0, 1), saving=True),
        m.Ready(3, (0, 1), True, False, "", True, True),
        Report(None, digest="d", searched=True),
    ],
)
def test_what_is_said_of_checkpoints_travels(message: m.Ready | Report) -> None:
    assert decode(encode(message)[LENGTH.size :])[0] == message


# ---- what a script comes to outside the shards


def reduced(machine: Machine, step: int, **theirs: Any) -> list[m.Effect]:
    """The effects up to the reduction of a step, in which the other brings shards 2 and 3."""
    effects = machine.handle(m.Computed(step), NOW)
    effects += machine.handle(m.Heard(1, "w1.1", m.Ready(step, (2, 3), **theirs)), NOW)
    machine.handle(m.Reduced(step), NOW)
    assert machine.phase is Phase.APPLYING
    return effects


@pytest.mark.parametrize("due", [True, False])
def test_what_the_script_wants_is_saved_without_a_mark_and_once(due: bool) -> None:
    machine = trains()
    reduced(machine, 0, save=due, mark=5)
    effects = machine.handle(m.Applied(0, save=True), NOW)
    assert [one for one in effects if isinstance(one, m.Save)] == [m.Save(1, MEMBERS, wanted=True)]
    reduced(machine, 1)
    assert m.Save not in kinds(machine.handle(m.Applied(1), NOW))


def test_without_checkpoints_nothing_is_saved() -> None:
    machine = trains()
    machine.checkpoints = False
    reduced(machine, 0)
    assert m.Save not in kinds(machine.handle(m.Applied(0, save=True), NOW))


def test_the_first_members_reason_is_everybodys() -> None:
    effects = reduced(trains(), 0, over="theirs")
    assert next(one for one in effects if isinstance(one, m.Reduce)).over == "theirs"
    machine = trains()
    machine.handle(m.Computed(0, over="mine"), NOW)
    (effect,) = machine.handle(m.Heard(1, "w1.1", m.Ready(0, (2, 3), over="theirs")), NOW)
    assert isinstance(effect, m.Reduce) and effect.over == "mine"


def test_who_is_here_and_who_has_gone_on() -> None:
    machine = trains()
    assert machine.is_here("w1.1") and not machine.is_here("w2.1") and not machine.others.has_gone_on("w1.1", 0)
    reduced(machine, 0)
    machine.handle(m.Heard(1, "w1.1", m.Ready(1, (2, 3))), NOW)
    assert machine.others.has_gone_on("w1.1", 1) and not machine.others.has_gone_on("w1.1", 2)
    machine.handle(m.PeerLost(1, "w1.1", "gone"), NOW)
    assert machine.phase is Phase.APPLYING and not machine.is_here("w1.1")


def test_a_joiner_tells_in_later_views_too_with_what_state_it_came() -> None:
    """It has not been through the lines of the steps before, and nobody waits for it there."""
    joiner = Machine("w1.1", shards=4, digest="same", two_rounds=False, checkpoints=False)
    registered = tuple(Registered(id, index) for index, id in enumerate(MEMBERS))
    joiner.handle(m.LedgerSaw(LedgerState(View(1, MEMBERS), 1, registered, size=2)), NOW)
    joiner.handle(m.Heard(1, "w0.1", Report(5, (), True)), NOW)
    joiner.handle(m.Loaded(5), NOW)
    joiner.handle(m.PeerLost(1, "w0.1", "a connection broke"), NOW)
    joiner.handle(m.LedgerSaw(LedgerState(View(2, MEMBERS), 2, registered, size=2)), NOW)
    effects = joiner.handle(m.Computed(5), NOW)
    (report,) = (one.message for one in effects if isinstance(one, m.Broadcast) and isinstance(one.message, Report))
    assert report.given == 5
    others = Whereabouts({"w1.1": report, "w0.1": Report(5, (), True)}, {}, None)
    assert others.came_with("w1.1", 5) and not others.came_with("w1.1", 6) and not others.came_with("w0.1", 0)


def test_who_took_the_initial_state_of_another_has_been_through_everything() -> None:
    assert trains("w1.1").given == -1


def test_what_is_shared_travels() -> None:
    for message in (
        m.Ready(3, (0, 1), over="val_loss rises"),
        m.Shared((7, 1, 0, 2), (("0", {"loss": [0.1, 4.0]}), ("1", {"loss": [float("inf"), 4.0]}))),
        m.Shared((0, 0, 3, 1 << 30), ()),
    ):
        assert decode(encode(message)[LENGTH.size :])[0] == message


@pytest.mark.parametrize(
    "body",
    [
        b'{"t":"shared","s":1,"at":[0,0],"i":[]}',
        b'{"t":"shared","s":1,"at":[0,0,"x"],"i":[]}',
        b'{"t":"shared","s":-1,"at":[0,0,0],"i":[]}',
        b'{"t":"shared","s":1,"at":[0,0,0],"i":{}}',
        b'{"t":"shared","s":1,"at":[0,0,0],"i":[[1,2]]}',
        b'{"t":"shared","s":1,"at":[0,0,0],"i":[["a"]]}',
    ],
)
def test_nonsense_is_refused(body: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(body)
