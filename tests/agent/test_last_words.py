"""What is said of workers that die in the middle of steps that take a millisecond: where, and their own last words."""

from __future__ import annotations

from pathlib import Path

import pytest
from agent_harness import a_run

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]

TINY = str(Path(__file__).with_name("tiny_training.py"))
AT = 400


@pytest.mark.parametrize(
    ("how", "ended"), [("raise", "failed, exit code 1"), ("exit", "failed, exit code 7"), ("kill", "killed, signal 9")]
)
def test_the_step_is_right_and_the_last_words_are_there(tmp_path: Path, how: str, ended: str) -> None:
    """All workers die at the same step, twice; the run keeps no checkpoint, so it begins again in between."""
    with a_run(tmp_path / "home") as run:
        script = (TINY, "--at", str(AT), "--die", how)
        options = ("--workers", "2", "--restarts", "2", "--checkpoint", "none")
        code = run.agent(*options, script=script).wait(timeout=90)
        assert code == {"raise": 1, "exit": 7, "kill": 137}[how]
        out = run.output
        dead = [event["worker"] for event in run.events("worker_exited")]
        assert {"w0.1", "w1.1"} < set(dead)
        for worker in dead:
            lines = out.splitlines()
            said = lines.index(f"{worker} | last words of {worker} at step {AT}")
            died = lines.index(f"holdfast | {worker} ended: {ended}, at step {AT}")
            assert said < died, out
        assert {event["step"] for event in run.events("failed")} == ({AT} if how == "raise" else set())
        assert out.count(f"training begins again at step 0, although it had got to step {AT}") == 1
        assert "--checkpoint" in out
        assert "and no end of line" in out
        assert f"{dead[-1]} said:" in out
        assert "before the first step" not in out
        assert "step None" not in out and "Traceback" not in out.replace("end of lineTraceback", "")
        if how == "raise":
            assert "KeyError: 'boom'" in out
