"""Servers end by kill -9 at each step of the protocol: nothing acknowledged is lost, nothing is there twice."""

from __future__ import annotations

import pytest

from holdfast.core.words import KEY_TARGETS
from holdfast.servers.placing import Target
from tests.harness.servers.accounting import Accounts
from tests.harness.servers.fleet import Fleet
from tests.servers.test_failover import busy, goes_on

pytestmark = [pytest.mark.processes, pytest.mark.timeout(280), pytest.mark.xdist_group("parameter-servers")]

OF_A_PRIMARY = ("Store", "Send", "Apply", "Acknowledge", "TakeSnapshot", "DropPrefix")
OF_THE_OTHERS = ("Store", "Send", "Apply")
ON_A_DISK = ("Store", "Send", "Apply", "Acknowledge")


def whole(fleet: Fleet) -> bool:
    running = set(fleet.processes)
    return all(len(one.replicas) == 3 and set(one.replicas) <= running for one in fleet.configurations().values())


def replaced(fleet: Fleet, name: str, accounts: Accounts) -> None:
    fleet.replace(name)
    fleet.wait_for(lambda: whole(fleet), f"another has taken the place of {name}")
    goes_on(fleet, accounts)


def test_servers_that_have_it_in_memory_end_at_each_step() -> None:
    with Fleet(3, replicas=3, ends_at_steps=True) as fleet, busy(fleet, slices=1) as accounts:
        for effects, leads in ((OF_A_PRIMARY, True), (OF_THE_OTHERS, False)):
            for effect in effects:
                configuration = fleet.configurations()["parameters/0"]
                chosen = next(one for one in configuration.replicas if (one == configuration.primary) == leads)
                fleet.end_at(chosen, effect)
                fleet.wait_for_end(chosen)
                replaced(fleet, chosen, accounts)
        accounts.stop()
        accounts.check()


def test_one_that_is_added_ends_while_it_catches_up() -> None:
    with Fleet(3, replicas=3, ends_at_steps=True) as fleet, busy(fleet, slices=1) as accounts:
        for effect in ("FetchSnapshot", "Restore"):
            configuration = fleet.configurations()["parameters/0"]
            gone = next(one for one in configuration.replicas if one != configuration.primary)
            fleet.kill(gone)
            new = fleet.start(int(gone[1:].partition(".")[0]))
            fleet.wait_for(lambda new=new: new in fleet.registered(), f"{new} is registered")  # type: ignore[misc]
            fleet.end_at(new, effect)
            rest = tuple(one for one in configuration.replicas if one != gone)
            fleet.ledger.put(KEY_TARGETS + "parameters/0", Target((*rest, new)).encode())
            fleet.wait_for_end(new)
            goes_on(fleet, accounts)
            last = fleet.start(int(gone[1:].partition(".")[0]))
            fleet.ledger.put(KEY_TARGETS + "parameters/0", Target((*rest, last)).encode())
            fleet.wait_for(lambda: whole(fleet), "the slice has three replicas again")
        accounts.stop()
        accounts.check()


def test_servers_with_disks_end_at_each_step_and_come_back() -> None:
    """The next primary, too, before its proposal: then two of three are gone, and both have what they promised."""
    with Fleet(3, replicas=3, durable=True, ends_at_steps=True) as fleet, busy(fleet, slices=1) as accounts:
        for effect in ON_A_DISK:
            name = fleet.configurations()["parameters/0"].primary
            fleet.end_at(name, effect)
            fleet.wait_for_end(name)
            fleet.restart(name)
            goes_on(fleet, accounts)
        configuration = fleet.configurations()["parameters/0"]
        others = [one for one in configuration.replicas if one != configuration.primary]
        for one in others:
            fleet.end_at(one, "Propose")
        fleet.kill(configuration.primary)
        fleet.wait_for(lambda: not all(fleet.is_living(one) for one in others), "one ends as it proposes")
        fleet.restart(configuration.primary)
        for one in [one for one in others if not fleet.is_living(one)]:
            fleet.wait_for_end(one)
            fleet.restart(one)
        goes_on(fleet, accounts)
        accounts.stop()
        accounts.check()
