"""One worker pauses now and then: the others go on without it, it comes back, and the weights are the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from harness import DEADLINE_S, holdfast, training

from holdfast.events import read_events

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]
SCRIPT = str(Path(__file__).parents[2] / "benchmarks" / "straggler_worker.py")
TRAINING = ["--shards", "12", "--steps", "130"]


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The digest of a run of one."""
    out = tmp_path_factory.mktemp("quiet")
    command = [sys.executable, SCRIPT, "--out", str(out), *TRAINING, "--shard-s", "0"]
    subprocess.run(command, capture_output=True, timeout=DEADLINE_S, check=True)
    return str(json.loads((out / "w0.1.json").read_text())["digest"])


@pytest.mark.parametrize(("options", "how"), [(["--workers", "3"], []), (["--workers", "2"], ["--freeze"])])
def test_who_pauses_comes_back(options: list[str], how: list[str], quiet: str, tmp_path: Path) -> None:
    """Its script waits; or its whole process is stopped, for longer than its lease."""
    pauses = ["--slow", "w1", "--pause", "1.2", "--every", "2", "--from-step", "12", *how]
    script = [SCRIPT, "--out", str(tmp_path), *TRAINING, *pauses]
    with training(tmp_path, *options, "--lease", "1", "--checkpoint", "none", script=script) as run:
        assert run.finish(DEADLINE_S) == quiet
    events = read_events(run.directory.events)
    late = [event for event in events if event["kind"] == "late"]
    assert "w1.1" in {event["worker"] for event in late}
    assert all(event["waited_s"] >= 0.5 and event["expected_s"] > 0 for event in late)
    back = [event for event in events if event["kind"] == "caught_up" and event["worker"] == "w1.1"]
    assert back and all(event["behind"] >= 0 and event["who"] == "w1.1" for event in back)
    assert any(event["behind"] > 0 for event in back)
    # Every step of its own is there once: what it was left behind in was ended in order.
    seen = [event["step"] for event in events if event["kind"] == "joined" and event["who"] == "w1.1"]
    assert seen == sorted(set(seen))


def test_a_time_that_makes_no_sense(tmp_path: Path) -> None:
    for value in ("soon", "0.01s", "9999h"):
        done = holdfast("run", "--workers", "1", "--late-after", value, sys.executable, home=tmp_path)
        assert done.returncode == 2 and "--late-after is" in done.stderr and "hint:" in done.stderr
