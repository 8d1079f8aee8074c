"""Real runs whose dense part is exact and whose rows are on servers, beside workers and servers that are killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from holdfast.testing.observed_run import ObservedRun, send

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]
EXAMPLE = Path(__file__).parents[2] / "examples" / "recommender.py"
SMALL = ["--steps", "40", "--samples", "8000", "--batch-size", "64"]


def started(home: Path, name: str, workers: int, servers: int, *words: str) -> ObservedRun:
    options = ["--workers", str(workers), "--servers", str(servers)]
    run = ObservedRun(home, name, options, [str(EXAMPLE), *SMALL, *words])
    run.start()
    return run


def servers_of(run: ObservedRun) -> list[int]:
    """The processes of its servers."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words, variables = (place / "cmdline").read_bytes(), (place / "environ").read_bytes()
        except OSError:
            continue
        if b"server_process" in words and str(run.directory.path).encode() in variables:
            found.append(int(place.name))
    return sorted(found)


def test_with_frozen_tables_the_dense_part_is_exact(tmp_path: Path) -> None:
    digests = []
    for workers in (1, 3):
        run = started(tmp_path, f"frozen{workers}", workers, 1, "--frozen", "--slow", "0.02" if workers > 1 else "0")
        try:
            if workers > 1:
                run.wait(lambda run=run: run.step >= 4 and len(run.living_members()) == 3, "three that train", 120.0)
                send(run.pids[run.members[0]], signal.SIGKILL)
            digests.append(run.finish(150.0))
        finally:
            run.end()
    assert digests[0] == digests[1]


def test_trained_tables_outlive_a_server_and_a_worker(tmp_path: Path) -> None:
    run = started(tmp_path, "trained", 2, 3, "--slow", "0.03")
    try:
        run.wait(lambda: run.step >= 6 and len(run.living_members()) == 2, "two workers that train", 120.0)
        os.kill(servers_of(run)[0], signal.SIGKILL)
        at = run.step
        run.wait(lambda: run.step >= at + 6, "steps after a server was killed", 60.0)
        send(run.pids[run.members[1]], signal.SIGKILL)
        run.finish(150.0)
        assert "AUC" in run.log()
    finally:
        run.end()


def test_a_run_goes_on_with_the_rows_of_its_checkpoint_and_with_a_log_beside_it(tmp_path: Path) -> None:
    log = ["--publish", str(tmp_path / "log")]
    run = started(tmp_path, "long", 1, 1, *log)
    try:
        run.finish(90.0)
    finally:
        run.end()
    for servers, steps, words in ((2, "50", []), (1, "60", log)):
        run = started(tmp_path, "long", 2, servers, "--steps", steps, *words)
        try:
            run.wait(run.over, "the end of the run", 90.0)
            assert run.agent is not None and run.agent.returncode == 0 and f"after {steps} steps: AUC" in run.log()
        finally:
            run.end()


def test_a_run_without_servers_is_told_that_tables_need_some(tmp_path: Path) -> None:
    run = ObservedRun(tmp_path, "none", ["--workers", "1"], [str(EXAMPLE), *SMALL])
    run.start()
    try:
        run.wait(lambda: "are on parameter servers in a run, and this one has none" in run.log(), "the sentence", 90.0)
    finally:
        run.end()
