"""Lightning's fit under real faults: one worker's weights and metrics, whatever happens to three."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.integrations.faults import same_through_faults

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(find_spec("lightning") is None, reason="there is no Lightning here"),
]
TRAINING = str(Path(__file__).with_name("training.py"))


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_killed_joined_stopped_and_resumed(tmp_path: Path) -> None:
    home = tmp_path / "files"
    script = [TRAINING, "--epochs", "6", "--shuffle", "--dropout", "0.3", "--spread", "--home", str(home)]
    same_through_faults(tmp_path, script, steps=24)


@pytest.mark.skipif(os.environ.get("HOLDFAST_DRILLS") != "all", reason="a long test: HOLDFAST_DRILLS=all")
def test_two_optimizers_by_hand(tmp_path: Path) -> None:
    script = [TRAINING, "--by-hand", "--accumulate", "1", "--epochs", "5", "--shuffle", "--dropout", "0.3"]
    same_through_faults(tmp_path, [*script, "--home", str(tmp_path / "files")], steps=40, stride=2)
