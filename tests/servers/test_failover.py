"""Servers are killed and stopped while workers push: nothing acknowledged is lost, nothing is there twice."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.harness.servers.accounting import Accounts
from tests.harness.servers.fleet import Fleet

OPEN_AGAIN_S_MAX = 10.0


@contextmanager
def busy(fleet: Fleet, *, slices: int = 3, pushes_max: int = 20_000, pace_s: float = 0.005) -> Iterator[Accounts]:
    accounts = Accounts(fleet, slices=slices, pushes_max=pushes_max, pace_s=pace_s)
    try:
        accounts.start(workers=2, readers=1)
        fleet.wait_for(lambda: len(accounts.acknowledged) >= 10, "updates are acknowledged")
        yield accounts
    finally:
        accounts.close()


def goes_on(fleet: Fleet, accounts: Accounts, updates: int = 10) -> None:
    before = len(accounts.acknowledged)
    fleet.wait_for(lambda: len(accounts.acknowledged) >= before + updates, "updates are acknowledged again")


def test_the_primaries_are_killed_one_after_the_other() -> None:
    with Fleet(3, replicas=3) as fleet, busy(fleet) as accounts:
        for number in range(3):
            name = fleet.configurations()[f"parameters/{number}"].primary
            fleet.kill(name, announce=number == 0)
            goes_on(fleet, accounts)
            new = fleet.replace(name)
            fleet.wait_for(
                lambda name=name, new=new: all(  # type: ignore[misc]
                    new in one.replicas and name not in one.replicas for one in fleet.configurations().values()
                ),
                f"{new} has taken the place of {name}",
            )
            goes_on(fleet, accounts)
        accounts.stop()
        accounts.check()


def test_a_primary_that_was_stopped_and_wakes_serves_nothing_old_as_fresh() -> None:
    with Fleet(3, replicas=3) as fleet, busy(fleet) as accounts:
        name = fleet.configurations()["parameters/0"].primary
        process = fleet.processes[name]
        os.kill(process, signal.SIGSTOP)
        fleet.wait_for(
            lambda: all(one.primary != name for one in fleet.configurations().values()), "another server leads"
        )
        goes_on(fleet, accounts)
        os.kill(process, signal.SIGCONT)
        goes_on(fleet, accounts, 50)
        accounts.stop()
        accounts.check()


@pytest.mark.parametrize("announce", [False, True])
def test_the_slice_is_open_again_within_seconds(announce: bool) -> None:
    """How fast it is, benchmarks/parameter_server.py says; here the machine may be busy."""
    with Fleet(3, replicas=3) as fleet, busy(fleet) as accounts:
        killed_at = time.monotonic()
        fleet.kill(fleet.configurations()["parameters/0"].primary, announce=announce)
        goes_on(fleet, accounts, 3)  # two may have been under way, one of each worker
        open_after_s = time.monotonic() - killed_at
        assert open_after_s < OPEN_AGAIN_S_MAX, open_after_s
        accounts.stop()
        accounts.check()


def test_what_is_on_disk_outlives_all_servers() -> None:
    with Fleet(3, replicas=3, durable=True) as fleet, busy(fleet) as accounts:
        names = list(fleet.processes)
        for name in names:
            fleet.kill(name)
        for name in names:
            fleet.restart(name)
        goes_on(fleet, accounts)
        accounts.stop()
        accounts.check()
