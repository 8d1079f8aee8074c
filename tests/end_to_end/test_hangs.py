"""Workers that live and do not get on: found, written down with what they were doing, and replaced. And only those."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from harness import DEADLINE_S, Training, holdfast, training

from holdfast.events import read_events

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]
HANGING = str(Path(__file__).with_name("hanging.py"))
STEPS = 60
SCRIPT = [HANGING, "--steps", str(STEPS)]


@pytest.fixture(scope="module")
def quiet() -> str:
    """The digest of a run in which nobody hung."""
    done = subprocess.run([sys.executable, *SCRIPT], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1]


def hung(run: Training) -> dict[str, dict[str, Any]]:
    events = read_events(run.directory.events)
    return {event["worker"]: event for event in events if event["kind"] == "hung"}


def test_a_deadlock_and_stuck_datasets_are_found_and_said_where(quiet: str, tmp_path: Path) -> None:
    """One takes a lock twice in a shard, one waits for a sample, one for its loader process, which waits for one."""
    who = ["--deadlock", "w1.1", "--stuck", "w2.1", "--stuck-loader", "w3.1"]
    # With a pause in each shard, and many of them, all are about as fast, and all get some. Who has had too few of them
    # to be known, since starting its loader process took it long, is found by the other limit.
    script = [*SCRIPT, "--at", "20", *who, "--place", str(tmp_path), "--pause", "0.015"]
    with training(tmp_path, "--workers", "4", "--stuck-after", "1s", "--hang-after", "10s", script=script) as run:
        assert run.finish(DEADLINE_S) == quiet
        found = hung(run)
        assert found.keys() == {"w1.1", "w2.1", "w3.1"}
        assert all(event["killed"] and event["step"] >= 20 for event in found.values())
        deadlock, stuck, loader = found["w1.1"], found["w2.1"], found["w3.1"]
        assert deadlock["activity"] == "in a shard" and deadlock["seconds"] >= 1.0
        assert stuck["activity"] == "loading a batch" and stuck["seconds"] >= 3.0
        # The thread that trains comes first, and its innermost line first.
        assert deadlock["stacks"].splitlines()[1].endswith("in take_a_lock_twice"), deadlock["stacks"]
        assert stuck["stacks"].splitlines()[1].endswith("in __getitem__"), stuck["stacks"]
        assert loader["activity"] == "loading a batch"
        assert "in __getitem__" in loader["stacks"].partition("its process ")[2], loader["stacks"]
        assert run.said("w1.1 hangs: in a shard of step 2") and run.said("in take_a_lock_twice")
        assert run.said("w1.1 ended: hung") and run.said("w2.1 ended: hung")


def test_a_long_evaluation_is_none_of_this_and_a_stopped_process_is(quiet: str, tmp_path: Path) -> None:
    """The evaluation sleeps, for longer than a shard might. After it one worker is stopped."""
    script = [*SCRIPT, "--at", "20", "--evaluate", "4", "--place", str(tmp_path), "--pause", "0.01"]
    with training(tmp_path, "--workers", "2", "--stuck-after", "1s", "--lease", "30", script=script) as run:
        run.wait(lambda: len(list(tmp_path.glob("evaluates-*"))) == 2, "both to evaluate", DEADLINE_S)
        status = holdfast_status(tmp_path)
        tmp_path.joinpath("go").touch()
        assert {worker["level"] for worker in status["workers"]} <= {"ok", "slow to answer"}
        assert {worker["activity"] for worker in status["workers"]} == {"in the script's lines outside the shards"}
        run.wait(lambda: run.step >= 25, "the end of the evaluation", DEADLINE_S)
        assert hung(run) == {}
        victim = run.living_members()[1]
        os.kill(run.pids[victim], signal.SIGSTOP)
        run.wait(lambda: run.said(f"{victim} ended: hung"), "the end of the stopped worker", 20)  # not of its lease
        assert run.finish(DEADLINE_S) == quiet
        found = hung(run)
        assert found.keys() == {victim}
        assert "the process is stopped" in found[victim]["reason"]
        # py-spy tells, where it is installed and allowed; else we say that nobody could.
        assert "hanging.py" in found[victim]["stacks"] or "does not answer (state T" in found[victim]["stacks"]


def holdfast_status(home: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "holdfast", "status", "--json", "--dir", str(home), "r"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    status: dict[str, Any] = json.loads(done.stdout)
    return status


def test_the_only_member_is_not_ended_but_told_of(tmp_path: Path) -> None:
    script = [*SCRIPT, "--at", "20", "--deadlock", "w0.1"]
    with training(tmp_path, "--workers", "1", "--stuck-after", "0.5s", script=script) as run:
        run.wait(lambda: "w0.1" in hung(run), "the event", DEADLINE_S, period_s=0.1)
        event = hung(run)["w0.1"]
        assert event["killed"] is False and "the only member" in event["reason"]
        assert "take_a_lock_twice" in event["stacks"]
        (worker,) = holdfast_status(tmp_path)["workers"]
        assert worker["level"] == "hung" and "in a shard of step 20" in worker["reason"]
        assert run.living_members() == ["w0.1"]


@pytest.mark.parametrize(
    ("option", "text"), [("--stuck-after", "soon"), ("--hang-after", "0.1s"), ("--hang-after", "9999h")]
)
def test_a_patience_that_makes_no_sense(option: str, text: str, tmp_path: Path) -> None:
    done = holdfast("run", "--workers", "1", option, text, HANGING, home=tmp_path)
    assert done.returncode == 2 and f"holdfast: {option} is" in done.stderr and "hint:" in done.stderr
