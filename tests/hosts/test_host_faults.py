"""A run on several hosts while hosts, the network and the ledger fail. Each ends with the exact digest."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest
from hosts_harness import Land, Training, started, wall

from holdfast.core.words import host_of
from holdfast.events import read_events
from holdfast.testing.observed_run import send
from holdfast.trust.keys import create_keys

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240), pytest.mark.xdist_group("hosts")]

MakeLand = Callable[..., Land]


def test_three_hosts_and_one_of_them_loses_power(make_land: MakeLand) -> None:
    """The cable goes first: nobody gets a word of farewell. When it is back, its workers join again.

    The agents of the others, which heard it beat, say so, each in its own log.
    """
    land = make_land("h1", "h2", "h3")
    with started(land.training(workers=2, pause_s=0.07)) as run:
        run.wait_step(20)
        assert run.member_hosts() == {"h1", "h2", "h3"}
        run.wait(lambda: "h2       ok: 2 ok, at step" in run.status("h1"), "h1 to hear how h2's workers look", 30)
        land.board.unplug("h2")
        run.power_off("h2")
        run.wait(lambda: "h2" not in run.member_hosts(), "a view without h2", 20)
        run.wait(
            lambda: all(_found_silent(run, one, "h2") for one in ("h1", "h3")), "both to say that h2 is silent", 20
        )
        run.wait_more(10)
        land.board.plug("h2")
        run.power_on("h2")
        run.wait(lambda: "h2" in run.member_hosts(), "h2 again", 60)
        run.wait_more(10)
        run.ends_exact()


def _found_silent(run: Training, watcher: str, host: str) -> bool:
    events = read_events(run.hosts[watcher].directory.events)
    return any(event["kind"] == "host_silent" and event["host"] == host for event in events)


def test_the_minority_pauses_says_why_and_comes_back(make_land: MakeLand) -> None:
    land = make_land("h1", "h2", "h3")
    with started(land.training(steps=500)) as run:  # on a busy machine h3 needs its time to come back
        run.wait_step(20)
        land.board.cut(["h3", "e3"], ["h1", "h2", "e1", "e2"])
        run.wait(lambda: run.member_hosts() == {"h1", "h2"}, "a view without h3", 30)
        run.wait_more(20)
        alone = run.hosts["h3"]
        run.wait(lambda: "paused" in alone.log(), "h3 to say that it is paused", 30)
        assert "cannot reach the ledger" in alone.log()
        assert "paused" in run.status("h3")
        assert "membership is frozen" in run.status("h3")
        before = {path.name: path.read_text() for path in run.times.glob("*@h3.times")}
        run.wait_more(20)
        assert {path.name: path.read_text() for path in run.times.glob("*@h3.times")} == before, "h3 went on alone"
        land.board.heal()
        run.wait(lambda: "h3" in run.member_hosts(), "h3 again", 60)
        run.ends_exact()


def test_all_hosts_but_one_are_cut_off_from_the_ledger(make_land: MakeLand) -> None:
    """The side with the ledger's majority goes on, though it is the smaller one of the workers."""
    land = make_land("h1", "h2", "h3")
    with started(land.training()) as run:
        run.wait_step(20)
        land.board.cut(["h1", "h2", "e1"], ["h3", "e2", "e3"])
        run.wait(lambda: run.member_hosts() == {"h3"}, "h3 alone", 30)
        run.wait_more(20)
        land.board.heal()
        run.wait(lambda: run.member_hosts() == {"h1", "h2", "h3"}, "all again", 90)
        run.ends_exact()


@pytest.mark.parametrize("one_way", [False, True])
def test_two_hosts_reach_the_ledger_and_not_each_other(make_land: MakeLand, one_way: bool) -> None:
    """One of them goes on; the other's worker comes back when it can be reached."""
    land = make_land("h1", "h2")
    with started(land.training()) as run:
        run.wait_step(20)
        if one_way:
            land.board.cut_one_way("h1", "h2")
        else:
            land.board.cut("h1", "h2")
        run.wait(lambda: len(run.member_hosts()) == 1, "a view of one host", 60)
        run.wait_more(20)
        land.board.heal()
        run.wait(lambda: len(run.member_hosts()) == 2, "both again", 90)
        run.ends_exact()


def test_a_bad_network(make_land: MakeLand) -> None:
    """Slow, losing packets, flapping: training gets on, if slowly, and is exact."""
    land = make_land("h1", "h2")
    with started(land.training()) as run:
        run.wait_step(10)
        land.board.slow("h1", "20mbit")
        run.wait_more(10)
        land.board.slow("h1", "")
        land.board.lose(5)
        run.wait_more(10, 120)
        land.board.lose(0)
        for _ in range(6):
            land.board.cut("h1", "h2")
            run.wait(_after(0.25), "a moment")
            land.board.heal()
            run.wait(_after(0.25), "a moment")
        run.wait_more(10)
        run.ends_exact()


def _after(seconds: float) -> Callable[[], bool]:
    """The fault is to last so long: time itself is what is waited for."""
    end = wall() + seconds
    return lambda: wall() >= end


def test_a_worker_that_slept_wakes_fenced(make_land: MakeLand) -> None:
    """Its agent is killed too, so nobody ends it in its sleep. It finds a view without it, and is replaced."""
    land = make_land("h1", "h2")
    with started(land.training("--late-after", "none")) as run:  # or it would come back by itself
        run.wait_step(20)
        sleeper = next(member for member in run.members if host_of(member) == "h2")
        agent = run.hosts["h2"].agent
        assert agent is not None
        agent.kill()
        agent.wait()
        pid = run.pids[sleeper]
        os.kill(pid, signal.SIGSTOP)
        run.wait(lambda: run.members and sleeper not in run.members, f"a view without {sleeper}", 30)
        run.wait_more(10)
        mine = run.times / f"{sleeper}.times"
        before = mine.read_text()
        send(pid, signal.SIGCONT)
        run.wait(lambda: run.evicted == 1, "it to find out", 30)
        assert mine.read_text() == before, "it applied a step after it woke"
        run.hosts["h2"].start()
        run.wait(lambda: "h2" in run.member_hosts(), "h2 again", 60)
        run.ends_exact()


def test_hosts_over_ipv6(make_land: MakeLand) -> None:
    land = make_land("h1", "h2", six=True)
    with started(land.training()) as run:
        run.wait_step(20)
        assert run.member_hosts() == {"h1", "h2"}
        events = [event for host in run.hosts.values() for event in read_events(host.directory.events)]
        addresses = [event["address"] for event in events if event["kind"] == "registered"]
        assert addresses and all(address.startswith("tcp:[fd77::") for address in addresses)
        run.ends_exact()


def test_a_second_host_of_the_same_name_and_one_with_other_keys(make_land: MakeLand) -> None:
    land = make_land("h1", "h2")
    with started(land.training()) as run:
        run.wait_step(5)
        create_keys(land.home / "other")
        common = ["run", "--ledger", land.cluster.url, "--run", "r", "--workers", "1", "--dir", str(land.home / "x")]
        for options, sentence in (
            (["--keys", str(land.home / "keys"), "--host", "h1"], "already called h1"),
            (["--keys", str(land.home / "other"), "--host", "h3"], "not the keys of run r"),
        ):
            command = [*land.board.command("h2"), sys.executable, "-m", "holdfast", *common, *options, __file__]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
            assert done.returncode == 2, done
            assert sentence in done.stderr
            assert "hint:" in done.stderr
        run.ends_exact()
