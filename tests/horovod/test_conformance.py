"""Horovod's collectives, optimizer and the rest, case by case, with 2 and 3 workers, and over the network path.

The workers are started once for all cases: see cases.py and runner.py.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.horovod.cases import CASES

RUNNER = Path(__file__).with_name("runner.py")
CASES_MIN = 200  # so that a file of cases that says nothing is seen
WORLDS = {"2": ["--workers", "2"], "3": ["--workers", "3"], "2-network": ["--workers", "2", "--path", "network"]}
_results: dict[str, dict[str, list[str]]] = {}


def results(world: str, folders: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What each rank said of each case."""
    if world not in _results:
        _results[world] = call_cases("cases", WORLDS[world], folders.mktemp("horovod"))
    return _results[world]


def call_cases(module: str, options: list[str], folder: Path) -> dict[str, list[str]]:
    """Run a world that calls all cases of a module. The empty name: what it printed, and its exit code."""
    command = [sys.executable, "-m", "holdfast", "run", "--dir", str(folder), "--checkpoint", "none"]
    done = subprocess.run(
        [*command, *options, str(RUNNER), module, str(folder)], capture_output=True, text=True, timeout=250, check=False
    )
    found: dict[str, list[str]] = {}
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            one = json.loads(line)
            found.setdefault(one["name"], []).append(one["why"])
    found[""] = [done.stdout + done.stderr, str(done.returncode)]
    return found


@pytest.mark.processes
@pytest.mark.xdist_group("horovod")
@pytest.mark.parametrize("world", WORLDS)
def test_the_workers_come_to_their_end(world: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    found = results(world, tmp_path_factory)
    output, code = found[""]
    assert code == "0", output[-3000:]
    assert len(found) - 1 >= CASES_MIN


@pytest.mark.processes
@pytest.mark.xdist_group("horovod")
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", CASES)
def test_case(name: str, world: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    said = results(world, tmp_path_factory).get(name, [])
    for rank, why in enumerate(said):
        assert not why, f"rank {rank} of {world}:\n{why}"
    assert len(said) == int(world[0]), "not every rank came to this case"
