"""A run in which everybody waits: found within seconds, told with reasons and stacks, broken or ended. Only that."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from harness import DEADLINE_S, Training, training

from holdfast.checkpoint.restoring.reading import list_checkpoints
from holdfast.checkpoint.storage.opening import open_storage
from holdfast.events import read_events

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]
SCRIPT = [str(Path(__file__).with_name("standing_still.py")), "--steps", "60"]


@pytest.fixture(scope="module")
def quiet() -> str:
    """The digest of a run in which nobody waited."""
    done = subprocess.run([sys.executable, *SCRIPT], capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1]


def found(run: Training) -> list[dict[str, Any]]:
    return [event for event in read_events(run.directory.events) if event["kind"] == "standstill"]


def activities(home: Path) -> dict[str, str]:
    command = [sys.executable, "-m", "holdfast", "status", "--json", "--dir", str(home), "r"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return {worker["id"]: worker["activity"] for worker in json.loads(done.stdout)["workers"]}


def test_three_planted_standstills_are_found_within_ten_seconds_told_and_broken(quiet: str, tmp_path: Path) -> None:
    """At the end of a loop for nobody, with shards that it does not know of, and with a word that never arrives."""
    plants = ["w1.1:loop-end:0", "w2.1:forget:30", "w0.1:mute:45"]
    with training(tmp_path, "--workers", "3", "--late-after", "none", script=[*SCRIPT, "--plant", *plants]) as run:
        assert run.finish(DEADLINE_S) == quiet
        events = read_events(run.directory.events)
        told = found(run)
        assert [event["worker"] for event in told] == ["w1.1", "w2.1", "w0.1"], told
        assert all(event["killed"] and event["seconds"] >= 5.0 for event in told)
        for event in told:
            steps = [one["t"] for one in events if one["kind"] in ("progress", "joined") and one["t"] < event["t"]]
            assert event["t"] - max(steps) < 10.0, "since the last that went on"
        first, second, third = told
        assert first["waits"]["w0.1"] == "waiting for w1.1 to be ready in step 20"
        assert first["waits"]["w1.1"] == "waiting for w0.1, w2.1 to load the state of step 20"
        assert second["waits"]["w2.1"] == "waiting for nothing that it knows of"
        # A replacement that is let in just then makes a new group, in which the word of the next step is lost.
        assert re.fullmatch(r"waiting for w0\.1 to be ready in step 4[5-9]", third["waits"]["w1.2"])
        for event in told:
            for worker, words in event["waits"].items():
                assert f"{worker}, {words}:" in event["stacks"]
            assert event["stacks"].count("worker.py") >= 3
        assert run.said("the run stands still at step 20, w1.1 is ended, so that the others can go on: everybody waits")
        ends = {event["worker"]: event["reason"] for event in events if event["kind"] == "worker_exited"}
        assert {worker for worker, reason in ends.items() if reason == "hung"} == {"w0.1", "w1.1", "w2.1"}


def test_an_evaluation_or_a_step_that_takes_one_worker_long_is_none_of_this(quiet: str, tmp_path: Path) -> None:
    waits = ["--evaluate", "7", "--say", str(tmp_path), "--long", "1"]
    with training(tmp_path, "--workers", "2", "--late-after", "none", script=[*SCRIPT, *waits]) as run:
        run.wait(lambda: (tmp_path / "evaluates").exists(), "the evaluation", DEADLINE_S)
        run.wait(lambda: activities(tmp_path)["w1.1"] != "waiting for the others", "w1.1 to wait", DEADLINE_S)
        words = activities(tmp_path)
        assert words["w1.1"] == "waiting for w0.1 to be ready in step 20"
        assert words["w0.1"] == "in the script's lines after the loop"
        assert run.finish(DEADLINE_S) == quiet
        assert found(run) == []


def test_a_run_whose_only_state_is_in_the_way_ends_with_a_checkpoint(tmp_path: Path) -> None:
    script = [*SCRIPT, "--plant", "w0.1:forget:30"]
    with training(tmp_path, "--workers", "1", "--checkpoint", str(tmp_path / "saved"), script=script) as run:
        assert run.agent is not None
        assert run.agent.wait(DEADLINE_S) == 1
        (event,) = found(run)
        assert not event["killed"] and "no other member than w0.1 has the state" in event["reason"]
        assert run.said("the run waits for itself")
        saved = list_checkpoints(open_storage(str(tmp_path / "saved")))
        assert max(entry.step for entry in saved if entry.committed) == 30


def test_ctrl_c_ends_a_run_that_waits_within_seconds(tmp_path: Path) -> None:
    """With `--hang-after none` nobody is ended by us. The worker that is in the way is told of all the same.

    The script has each of two workers wait for the other, at different calls between its loops.
    """
    options = ["--workers", "2", "--late-after", "none", "--hang-after", "none"]
    with training(tmp_path, *options, script=[*SCRIPT, "--apart"]) as run:
        run.wait(lambda: bool(found(run)), "the event", DEADLINE_S, period_s=0.2)
        assert found(run)[0]["killed"] is False and len(run.living_members()) == 2
        assert found(run)[0]["waits"] == {
            "w0.1": "waiting for w1.1 to come to run.gather",
            "w1.1": "waiting for w0.1 to come to run.record",
        }
        assert run.agent is not None
        began = time.monotonic()
        os.kill(run.agent.pid, signal.SIGINT)
        assert run.agent.wait(DEADLINE_S) == 130
        assert time.monotonic() - began < 10.0  # about 3; before, 30 and a SIGKILL
        assert not run.said("did not leave in time")
        left = [event for event in read_events(run.directory.events) if event["kind"] == "left"]
        assert {event["who"] for event in left} == {"w0.1", "w1.1"} and "it was waiting for" in left[0]["reason"]
