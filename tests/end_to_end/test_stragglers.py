"""One worker is slow: its shards go to the others, it is named, and the weights are the same."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from harness import DEADLINE_S, holdfast, training

from holdfast.events import read_events

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]
SCRIPT = str(Path(__file__).parents[2] / "benchmarks" / "straggler_worker.py")
OPTIONS = ["--workers", "3", "--checkpoint", "none"]


def test_shards_leave_a_slow_worker(tmp_path: Path) -> None:
    for name in ("quiet", "slow"):
        (tmp_path / name).mkdir()
    arguments = ["--out", str(tmp_path), "--shards", "16", "--steps", "110"]
    with training(tmp_path / "quiet", *OPTIONS, script=[SCRIPT, *arguments, "--shard-s", "0"]) as quiet:
        expected = quiet.finish(DEADLINE_S)
    slow = ["--shard-s", "0.01", "--slow", "w1", "--times", "8"]
    with training(tmp_path / "slow", *OPTIONS, script=[SCRIPT, *arguments, *slow]) as run:
        run.wait(lambda: run.said("w1.1 is slow"), "the slow worker being named", DEADLINE_S)
        shown = holdfast("status", "r", "--dir", str(tmp_path / "slow"), home=tmp_path / "elsewhere").stdout
        assert "slow: w1.1: a shard takes it" in shown
        assert run.finish(DEADLINE_S) == expected
    events = read_events(run.directory.events)
    moves = [event for event in events if event["kind"] == "rebalanced"]
    assert moves and moves[-1]["shards"]["w1.1"] <= 3 and sum(moves[-1]["shards"].values()) == 16
    assert moves[-1]["paces_s"]["w1.1"] > 2 * moves[-1]["paces_s"]["w0.1"]
    (named,) = [event for event in events if event["kind"] == "slow" and event["worker"] == "w1.1"][:1]
    assert named["times"] > 2 and named["since_s"] >= 5
    assert not [event for event in events if event["kind"] in ("evicted", "lost")]


def test_absurd_arguments(tmp_path: Path) -> None:
    for value in ("-1", "0.9", "nan"):
        done = holdfast("run", "--workers", "1", "--replace-slow", value, sys.executable, home=tmp_path)
        assert done.returncode == 2 and "--replace-slow is" in done.stderr
