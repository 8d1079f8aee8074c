"""Whoever finds nothing must be able to find: servers with a lost update, a doubled one and a stale read."""

from __future__ import annotations

import math
import time

import pytest
import torch

from tests.harness.linearizability import BITS, Operation, explain
from tests.harness.servers.accounting import Accounts
from tests.harness.servers.direct_reads import read_directly
from tests.harness.servers.fleet import Fleet
from tests.harness.servers.gating import LEDGER

pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("parameter-servers")]
SLICES = 2


def busy(fleet: Fleet, updates: int) -> Accounts:
    accounts = Accounts(fleet, slices=SLICES, pushes_max=2_000)
    accounts.start(workers=2, readers=1)
    fleet.wait_for(lambda: len(accounts.acknowledged) >= updates, "updates are acknowledged")
    return accounts


@pytest.mark.parametrize(
    ("plant", "found"),
    [("lost update", "has lost .* acknowledged updates"), ("doubled update", "elements with .2. where 0 or 1 belongs")],
)
def test_the_accounts_find_updates_that_are_lost_or_doubled(plant: str, found: str) -> None:
    with Fleet(1, plant=plant) as fleet:
        accounts = busy(fleet, 30)
        try:
            accounts.stop()
            with pytest.raises(AssertionError, match=found):
                accounts.check()
        finally:
            accounts.close()


def read_of_who_was_deposed(plant: str) -> tuple[Accounts, str]:
    """A primary is cut off; others lead and acknowledge; then it is asked for a fresh read. What the check says."""
    with Fleet(3, replicas=3, plant=plant) as fleet:
        accounts = busy(fleet, 10)
        try:
            name = fleet.configurations()["parameters/0"].primary
            fleet.cut(name, {one for one in fleet.processes if one != name} | {LEDGER})
            fleet.wait_for(lambda: fleet.configurations()["parameters/0"].primary != name, "another server leads")
            before = len(accounts.acknowledged)
            fleet.wait_for(lambda: len(accounts.acknowledged) > before + 5, "updates are acknowledged again")
            called_at = time.monotonic()
            head, values = read_directly(fleet, name, 0, fresh=True)
            if head.get("fresh"):
                accounts.saw("stubborn", 0, called_at, time.monotonic(), values)
            fleet.cut(name, set())
            accounts.stop()
            try:
                accounts.check()
            except AssertionError as error:
                return accounts, str(error)
            assert head["kind"] == "later", head  # it has refused: it cannot know what is the newest
            return accounts, ""
        finally:
            accounts.close()


def test_the_check_of_histories_finds_a_stale_read() -> None:
    _, trouble = read_of_who_was_deposed("stale read")
    assert "the history of slice 0 is not linearizable" in trouble


def test_a_primary_that_was_deposed_serves_no_stale_read_as_fresh() -> None:
    accounts, trouble = read_of_who_was_deposed("")
    assert not trouble
    _check_that_changes_are_found(accounts.history[0])


def _check_that_changes_are_found(history: list[Operation]) -> None:
    """The same history with one thing changed in it, as the faults would."""
    reads = sorted((one for one in history if one.call[0] == "read"), key=lambda one: one.called_at)
    last, earlier = reads[-1], next(one for one in reads if one.outcome)
    others = [one for one in history if one is not last]
    lowest = last.outcome & -last.outcome
    assert explain([*others, _with(last, last.outcome & ~lowest)], BITS)  # lost
    assert explain([*others, _with(last, last.outcome | 1 << 1999)], BITS)  # never pushed
    assert explain([*others, _with(last, earlier.outcome)], BITS)  # stale
    adds = [one for one in history if one.call == ("add", lowest)]
    assert len(adds) == 1 and not math.isinf(adds[0].returned_at)
    assert not explain(history, BITS)


def _with(read: Operation, outcome: int) -> Operation:
    return Operation(read.client, read.call, read.called_at, read.returned_at, outcome)


def test_two_in_an_element_is_told_even_where_no_bit_shows_it() -> None:
    accounts = Accounts.__new__(Accounts)
    accounts.troubles = []
    accounts._bits(torch.tensor([1.0, 2.0]))
    assert accounts.troubles == ["elements with [2] where 0 or 1 belongs"]
