"""The examples that people start from: the same weights and the same best model with one worker and with three."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from holdfast.cli.main import main
from holdfast.testing.observed_run import ObservedRun, send

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]
EXAMPLES = Path(__file__).parents[2] / "examples"
CASES = {
    "gpt.py": (["--steps", "24", "--eval-every", "8", "--width", "32", "--layers", "1"], "val_loss:min"),
    "images.py": (["--epochs", "6", "--patience", "1", "--lr", "0.02"], "val_accuracy:max"),
}


def trained(name: str, home: Path, workers: int) -> tuple[str, bytes]:
    """The digest of the weights, and the file of the best model. Of several workers the leader is killed on the way."""
    arguments, criterion = CASES[name]
    place, best = home / f"checkpoints {workers}", home / f"best {workers}.safetensors"
    options = ["--workers", str(workers), "--checkpoint", str(place), "--keep-best", criterion]
    script = [str(EXAMPLES / name), *arguments, "--slow", "0.02" if workers > 1 else "0"]
    run = ObservedRun(home, f"run{workers}", options, script)
    run.start()
    try:
        if workers > 1:
            run.wait(lambda: run.step >= 4 and len(run.living_members()) == 3, "three workers that train", 120.0)
            send(run.pids[run.members[0]], signal.SIGKILL)
        digest = run.finish(150.0)
    finally:
        run.end()
    words = ["checkpoint", "export", str(place), "--best", criterion, "--only", "parameters", "--to", str(best)]
    assert main(words) == 0
    return digest, best.read_bytes()


def test_the_sharded_example_has_the_same_weights_with_two_groups_of_two_as_alone(tmp_path: Path) -> None:
    digests = []
    for ranks, workers in ((1, 1), (2, 2)):
        words = ["--steps", "12", "--width", "32", "--layers", "1", "--context", "32"]
        options = ["--workers", str(workers), "--ranks", str(ranks)]
        run = ObservedRun(tmp_path, f"run{workers}", options, [str(EXAMPLES / "sharded_gpt.py"), *words])
        run.start()
        try:
            digests.append(run.finish(90.0))
        finally:
            run.end()
    assert digests[0] == digests[1]


@pytest.mark.parametrize("name", CASES)
def test_an_example_is_exact_with_its_validation_and_best_model(name: str, tmp_path: Path) -> None:
    assert trained(name, tmp_path, 1) == trained(name, tmp_path, 3)
