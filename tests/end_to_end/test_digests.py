"""The same weights, whatever the number of workers, the path, the loaders and the way the script is started."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import train
from harness import DEADLINE_S, TRAIN, training

from tests.harness.forked import agreed, forked

pytestmark = [pytest.mark.processes, pytest.mark.timeout(150)]
STEPS = ["--steps", "12"]
SMALL = [*STEPS, "--width", "64"]  # one round of messages
LARGE = [*STEPS, "--width", "2048"]  # a million parameters: two rounds, each member adds a slice


@pytest.fixture(scope="module")
def alone() -> str:
    """The digest of `python train.py`."""
    done = subprocess.run(
        [sys.executable, TRAIN, *SMALL], capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1]


@pytest.mark.parametrize("path", ["shared-memory", "network"])
@pytest.mark.parametrize("arguments", [SMALL, LARGE], ids=["small", "large"])
def test_any_number_of_workers(path: str, arguments: list[str], alone: str) -> None:
    torch.set_num_threads(1)
    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)  # imports torch._dynamo: once, not in every fork
    digests = {
        workers: agreed(forked(lambda: train.main(arguments), workers=workers, path=path))
        for workers in (1, 2, 3, 4, 7)
    }
    assert len(set(digests.values())) == 1, digests
    if arguments is SMALL:
        assert digests[1] == alone


@pytest.mark.parametrize(
    "options",
    [
        ["--workers", "3", "--path", "shared-memory"],
        ["--workers", "2", "--path", "network", "--spares", "1"],
    ],
    ids=["shared-memory", "network"],
)
def test_holdfast_run_with_loader_processes_is_python_alone(options: list[str], tmp_path: Path, alone: str) -> None:
    with training(tmp_path, *options, script=[TRAIN, *SMALL, "--loaders", "1"]) as run:
        assert run.finish(DEADLINE_S) == alone
        assert f"weights: {alone}" in run.log()
        assert f"digest {alone}" in run.log()
