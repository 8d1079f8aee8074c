"""The disks of servers, with real processes: full ones, and what is left on them of slices that were moved away."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.core.words import KEY_TARGETS
from holdfast.servers.placing import Target
from tests.harness.servers.fleet import Fleet
from tests.servers.test_failover import busy, goes_on

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=96m", "tmpfs", os.fspath(disk)]
    try:
        subprocess.run(mount, check=True, capture_output=True, timeout=10)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot mount a small disk here: {error}")
    yield disk
    subprocess.run(["umount", "--lazy", os.fspath(disk)], check=True, timeout=10)


def fill(disk: Path) -> Path:
    """So that nothing more fits."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 16, 1 << 12, 1):
            try:
                while True:
                    file.write(b"x" * size)
            except OSError:
                continue
    return filler


def test_a_full_disk_under_all_logs_acknowledges_nothing_and_loses_nothing(small_disk: Path) -> None:
    fleet_on_it = Fleet(3, replicas=3, durable=small_disk)
    with fleet_on_it as fleet, busy(fleet, slices=2, pushes_max=4000, pace_s=0.03) as accounts:
        filler = fill(small_disk)
        said = lambda: [path.read_text() for path in fleet.directory.glob("s*.log")]  # noqa: E731
        fleet.wait_for(lambda: any("is full: No space left on device" in text for text in said()), "it is said")
        before = fleet.configurations()
        fleet.wait_for(lambda: stands_still(accounts.acknowledged), "nothing is acknowledged any more")
        name = before["parameters/0"].primary
        fleet.kill(name)
        filler.unlink()
        fleet.restart(name)
        goes_on(fleet, accounts)
        accounts.stop()
        accounts.check()


def stands_still(acknowledged: set[int]) -> bool:
    before = len(acknowledged)
    time.sleep(1.0)
    return len(acknowledged) == before


def test_a_slice_that_was_moved_away_leaves_no_files_and_comes_back_whole() -> None:
    with Fleet(4, replicas=3, durable=True) as fleet, busy(fleet, slices=1) as accounts:
        was = fleet.configurations()["parameters/0"]
        leaves = next(one for one in was.replicas if one != was.primary)
        (spare,) = set(fleet.processes) - set(was.replicas)
        others = tuple(one for one in was.replicas if one != leaves)
        files = fleet.disk_of(leaves) / "parameters%2F0"
        assert list(files.glob("*.segment"))
        for replicas in ((*others, spare), was.replicas):
            fleet.ledger.put(KEY_TARGETS + "parameters/0", Target(replicas).encode())
            is_there = lambda replicas=replicas: set(fleet.configurations()["parameters/0"].replicas) == set(replicas)  # type: ignore[misc]  # noqa: E731
            fleet.wait_for(is_there, f"the slice is on {replicas}")
            if leaves not in replicas:
                fleet.wait_for(lambda: not list(fleet.disk_of(leaves).iterdir()), "its files are deleted")
            goes_on(fleet, accounts)
        fleet.kill(leaves)
        fleet.restart(leaves)
        goes_on(fleet, accounts)
        accounts.stop()
        accounts.check()
