"""Who may still be heard: the ledger's news that a member has left may come before the last that it said."""

from __future__ import annotations

import pytest

from holdfast.core.words import View
from holdfast.engine.sharing import LEAVING_S, Sharing
from holdfast.membership.machine import Machine
from holdfast.membership.messages import PeerLost
from holdfast.membership.phases import Phase
from holdfast.membership.view_rules import LedgerState, Registered

BOTH, MINE = ("w0.1", "w1.1"), ("w0.1",)


class Two:
    """w0.1 in the lines after a step, and w1.1, which finishes."""

    def __init__(self) -> None:
        self.now = 100.0
        self.machine = Machine("w0.1", shards=2)
        self.machine.view = View(1, ("w0.1", "w1.1"))
        self.machine.phase = Phase.APPLYING
        self.registered(BOTH)
        self.sharing = Sharing(self.machine, lambda: self.now)

    def registered(self, ids: tuple[str, ...]) -> None:
        self.machine.ledger = LedgerState(registered=tuple(Registered(one, created) for created, one in enumerate(ids)))


@pytest.fixture
def two() -> Two:
    return Two()


def test_who_has_left_the_ledger_is_heard_out(two: Two) -> None:
    assert two.sharing.others() == ["w1.1"]
    two.registered(MINE)
    assert two.sharing.others() == ["w1.1"], "its connection stands: what it said may be on its way"
    two.machine.handle(PeerLost(1, "w1.1", "it closed the connection"), two.now)
    assert two.sharing.others() == [], "what it said came before its connection closed"


def test_one_whose_host_is_gone_never_closes_anything_and_is_not_waited_for_long(two: Two) -> None:
    two.registered(MINE)
    assert two.sharing.others() == ["w1.1"]
    two.now += LEAVING_S
    assert two.sharing.others() == []


def test_one_that_registers_again_and_leaves_later_has_its_time_again(two: Two) -> None:
    two.registered(MINE)
    assert two.sharing.others() == ["w1.1"]
    two.now += LEAVING_S
    two.registered(BOTH)
    assert two.sharing.others() == ["w1.1"]
    two.registered(MINE)
    assert two.sharing.others() == ["w1.1"]
