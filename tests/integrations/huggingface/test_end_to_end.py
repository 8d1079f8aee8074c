"""transformers.Trainer and an Accelerate loop under real faults: one worker's weights and losses, whatever happens.

The loop, and both on an iterable dataset, are part of `make soak`: HOLDFAST_DRILLS=all.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.integrations.faults import same_through_faults

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(find_spec("transformers") is None, reason="there are no transformers here"),
]
long = pytest.mark.skipif(os.environ.get("HOLDFAST_DRILLS") != "all", reason="a long test: HOLDFAST_DRILLS=all")
TRAINING = str(Path(__file__).with_name("training.py"))


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))


@pytest.mark.parametrize(
    "how",
    [
        "trainer",
        pytest.param("loop", marks=long),
        pytest.param("trainer --iterable", marks=long),
        pytest.param("loop --iterable", marks=long),
    ],
)
def test_killed_joined_stopped_and_resumed(how: str, tmp_path: Path) -> None:
    script = [TRAINING, *how.split(), "--steps", "20", "--dropout", "0.2", "--home", str(tmp_path / "files")]
    same_through_faults(tmp_path, script, steps=20)
