"""Servers are cut off, from each other and from the ledger, while workers push and read.

The workers reach all servers all the time: also a primary that is cut off, which must serve nothing old as fresh.
"""

from __future__ import annotations

import time

import pytest

from holdfast.log.rules import Rules
from tests.harness.servers.accounting import Accounts
from tests.harness.servers.fleet import Fleet
from tests.harness.servers.gating import LEDGER, Gate
from tests.servers.test_failover import busy, goes_on

pytestmark = pytest.mark.processes


def cut_from_ledger(fleet: Fleet, *, cut: bool) -> None:
    for name in fleet.processes:
        Gate(fleet.directory / f"{name}.gate").cut({LEDGER} if cut else set())


def stands_still_for(accounts: Accounts, seconds: float) -> None:
    """What was under way may still be acknowledged; then nothing is."""
    time.sleep(0.3)
    before, until = len(accounts.acknowledged), time.monotonic() + seconds
    while time.monotonic() < until:
        assert len(accounts.acknowledged) == before, "acknowledged without a majority"
        time.sleep(0.02)


def test_updates_go_on_while_no_server_reaches_the_ledger() -> None:
    """Static stability: leases between primary and replicas go on without it."""
    with Fleet(3, replicas=3) as fleet, busy(fleet) as accounts:
        before = fleet.configurations()
        cut_from_ledger(fleet, cut=True)
        until = time.monotonic() + 6 * Rules().lease_s
        while time.monotonic() < until:
            goes_on(fleet, accounts)
        assert fleet.configurations() == before, "nobody could have changed it"
        cut_from_ledger(fleet, cut=False)
        goes_on(fleet, accounts)
        accounts.stop()
        accounts.check()


def test_a_primary_that_is_cut_off_from_its_replicas_is_replaced_and_serves_nothing_old_as_fresh() -> None:
    with Fleet(3, replicas=3) as fleet, busy(fleet) as accounts:
        name = fleet.configurations()["parameters/0"].primary
        fleet.cut(name, {one for one in fleet.processes if one != name} | {LEDGER})
        fleet.wait_for(
            lambda: all(one.primary != name for one in fleet.configurations().values()), "another server leads"
        )
        goes_on(fleet, accounts, 50)
        fleet.cut(name, set())
        goes_on(fleet, accounts, 50)
        accounts.stop()
        accounts.check()


def test_without_the_ledger_a_slice_that_lost_its_primary_stands_still_until_it_is_back() -> None:
    """Nobody leads by its own decision."""
    with Fleet(3, replicas=3) as fleet, busy(fleet, slices=1) as accounts:
        cut_from_ledger(fleet, cut=True)
        goes_on(fleet, accounts)
        fleet.kill(fleet.configurations()["parameters/0"].primary)
        stands_still_for(accounts, 4 * Rules().lease_s)
        cut_from_ledger(fleet, cut=False)
        goes_on(fleet, accounts)
        accounts.stop()
        accounts.check()
