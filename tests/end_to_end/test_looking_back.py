"""A real run looked at as a user would: its output by time, its line in the list, its checkpoints, and its removal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import DEADLINE_S, TRAIN, training

from holdfast.agent.output.log_times import read_times
from holdfast.cli.main import main

pytestmark = [pytest.mark.processes, pytest.mark.timeout(150)]


def test_logs_runs_checkpoints_and_rm_of_a_real_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*arguments: str) -> tuple[int, str, str]:
        code = main([*arguments, "--dir", str(tmp_path)])
        got = capsys.readouterr()
        return code, got.out, got.err

    options = ["--workers", "2", "--save-every", "5"]
    with training(tmp_path, *options, script=[TRAIN, "--steps", "20"], held_at=10) as run:
        run.wait(lambda: run.at(10, 2), "both workers at step 10", DEADLINE_S)
        code, _, err = said("rm", "r")
        assert code == 2 and "run r is running, and is not deleted" in err
        assert said("runs")[1].splitlines()[1].split()[:2] == ["r", "running"]
        run.let_go()
        digest = run.finish(DEADLINE_S)
    lines = said("logs", "r")[1].splitlines()
    assert {f"{worker} | digest {digest}" for worker in ("w0.1", "w1.1")} <= set(lines)
    assert {"w0.1", "w1.1"} <= set(read_times(run.directory.logs))
    row = json.loads(said("runs", "--json")[1])[0]
    assert (row["state"], row["step"]) == ("finished", 20)
    assert row["started_s"] < row["changed_s"] and row["bytes"] > 0
    assert said("checkpoint", "verify", "r")[1] == "step 20: good\n"
    assert said("rm", "r", "--checkpoints", "--yes")[0] == 0
    assert not run.directory.path.exists()
