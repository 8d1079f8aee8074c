"""The ledger's members fail while training goes on: static stability, for real."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import pytest
from hosts_harness import Land, started, wall

from tests.harness import etcd_faults

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240), pytest.mark.xdist_group("hosts")]

MakeLand = Callable[..., Land]
OUTAGE_S = 60.0


def test_killing_the_leader_stalls_no_step(make_land: MakeLand) -> None:
    land = make_land("h1", "h2")
    with started(land.training()) as run:
        run.wait_step(20)
        quiet_from = wall()
        run.wait_more(40)
        quiet = run.longest_gap(quiet_from, wall())
        killed = wall()
        leader = etcd_faults.leader(land.cluster)
        land.cluster.kill(leader)
        assert etcd_faults.leader(land.cluster) != leader
        run.wait_more(40)
        stalled = run.longest_gap(killed, wall())
        land.cluster.restart(leader)
        assert stalled <= quiet + 0.2, f"{stalled:.3f} s without a step, {quiet:.3f} s before the leader was killed"
        assert not run.evicted
        run.ends_exact()


def test_an_outage_of_sixty_seconds(make_land: MakeLand) -> None:
    """Steps go on, and it is said that the membership is frozen. Who dies meanwhile is missed when it is over."""
    land = make_land("h1", "h2")
    with started(land.training(pause_s=0.1)) as run:
        run.wait_step(20)
        down = wall()
        for member in range(3):
            land.cluster.kill(member)
        run.wait(lambda: run.said("h1", "the membership is frozen"), "the agent to say so", 20)
        assert "membership is frozen" in run.status("h1")
        run.wait(lambda: wall() - down > OUTAGE_S - 15.0, "most of the outage", OUTAGE_S)
        assert run.at() > 60
        assert run.longest_gap(down, wall()) < 1.5
        assert run.view == 1
        assert "ledger away: membership frozen" in run.hosts["h1"].log()
        victim = run.members[-1]
        os.kill(run.pids[victim], signal.SIGKILL)
        run.wait(lambda: wall() - down > OUTAGE_S, "the rest of it", OUTAGE_S)
        at = run.at()
        assert run.view == 1, "a new view without a ledger"
        for member in range(3):
            land.cluster.restart(member, wait_s=0)
        land.cluster.wait_serving()
        back = wall()
        run.wait(lambda: victim not in run.members, "a view without the dead", 30)
        run.wait_step(at + 5)
        assert min(when for when in run.applied().values() if when > back) - back < 10.0
        run.ends_exact()


def test_training_pauses_when_the_ledger_stays_away_for_too_long(make_land: MakeLand) -> None:
    """Others might take us all for lost by then. When it is back, training goes on where it was."""
    land = make_land("h1", "h2")
    with started(land.training("--outage", "10")) as run:
        run.wait_step(10)
        down = wall()
        for member in range(3):
            land.cluster.kill(member)
        run.wait(lambda: "for longer than --outage" in run.log(), "a worker to say that it is paused", 60)
        assert wall() - down >= 9.0  # since its last renewal, which was up to half a second before
        assert "paused" in run.status("h1") + run.status("h2")
        at = run.at()
        run.wait(lambda: wall() - down > 15.0, "more time without a ledger")
        assert run.at() <= at + 1, "it went on"
        for member in range(3):
            land.cluster.restart(member, wait_s=0)
        run.wait_step(at + 10)
        assert not run.evicted
        run.ends_exact()
