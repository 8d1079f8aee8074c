"""All workers of all hosts are killed, hosts lose their memory: what is left of it is enough, or storage is read."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hosts_harness import Land, Training, started

from holdfast.checkpoint.host_memory.place import kept_steps, memory_directory, remove_memory, sweep
from holdfast.events import read_events
from holdfast.testing.observed_run import send
from holdfast.trust.keys import load_keys

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240), pytest.mark.xdist_group("hosts")]

MakeLand = Callable[..., Land]
STEPS = 120


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Iterator[None]:
    """Also of a run that a failing test has left unfinished."""
    yield
    shutil.rmtree(tmp_path / "runs", ignore_errors=True)
    sweep()


def memory_of(run: Training, host: str) -> Path:
    return memory_directory(run.hosts[host].directory.path, load_keys(run.home / "keys").secret)


def newest_in(run: Training, host: str) -> int:
    return max(kept_steps(memory_of(run, host)), default=-1)


def resumed(run: Training) -> list[dict[str, Any]]:
    """What workers of any host have gone on from, in order."""
    found = [event for host in run.hosts.values() for event in read_events(host.directory.events)]
    return sorted((event for event in found if event["kind"] == "resumed"), key=lambda event: float(event["t"]))


def kill_all(run: Training) -> int:
    """Every worker of every host, without a word. The newest step that all hosts with power keep."""
    run.look()
    for pid in run.pids.values():
        send(pid, signal.SIGKILL)
    return min(newest_in(run, host) for host in run.hosts if host not in run.off)


def wait_kept(run: Training, step: int) -> None:
    """Until every host has a snapshot that is newer."""
    run.wait(
        lambda: all(newest_in(run, host) > step for host in run.hosts),
        f"snapshots after step {step} in the memory of all hosts",
        60,
    )


def wait_resumed(run: Training, times: int) -> dict[str, Any]:
    run.wait(lambda: len(resumed(run)) >= times, f"the run to go on for the {times}. time", 90)
    assert len(resumed(run)) == times
    return resumed(run)[-1]


def lose(run: Training, *hosts: str) -> None:
    """As if these machines had been switched off: no process is left, and nothing in memory."""
    for host in hosts:
        run.power_off(host)
        remove_memory(memory_of(run, host))


def ends_exact_and_clean(run: Training) -> None:
    run.ends_exact()
    assert [host for host in run.hosts if memory_of(run, host).exists()] == []


def test_a_code_over_three_hosts_gives_back_what_one_has_lost_and_two_leave_to_storage(
    make_land: MakeLand, tmp_path: Path
) -> None:
    """The storage is emptied before it could be read, until only it is left."""
    store = tmp_path / "store"
    land = make_land("h1", "h2", "h3")
    options = ["--memory", "2+1", "--checkpoint", str(store), "--save-every", "5"]
    with started(land.training(*options, steps=STEPS)) as run:
        wait_kept(run, 0)
        lose(run, "h2")
        kept = kill_all(run)
        shutil.rmtree(store)
        run.power_on("h2")
        event = wait_resumed(run, 1)
        assert event["uri"] == "memory of h1, h3"
        assert event["step"] >= kept > 0

        wait_kept(run, event["step"])
        lose(run, "h2", "h3")
        kept = kill_all(run)
        run.power_on("h2")
        run.power_on("h3")
        event = wait_resumed(run, 2)
        assert event["uri"] == str(store)
        assert event["step"] <= kept
        ends_exact_and_clean(run)


def test_plain_copies_on_two_hosts_need_no_storage_at_all(make_land: MakeLand) -> None:
    land = make_land("h1", "h2")
    with started(land.training("--memory", "plain", "--save-every", "4", steps=STEPS, workers=2)) as run:
        wait_kept(run, 0)
        kept = kill_all(run)
        remove_memory(memory_of(run, "h1"))
        event = wait_resumed(run, 1)
        assert event["uri"] == "memory of h2"
        assert event["step"] >= kept > 0
        ends_exact_and_clean(run)
