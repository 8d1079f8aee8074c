"""TensorFlow loops and Keras' fit under real faults: one worker's weights and history, whatever happens to three.

The drills that hold are part of `make soak`: HOLDFAST_DRILLS=all.
"""

from __future__ import annotations

import os
import signal
from importlib.util import find_spec
from pathlib import Path

import numpy
import pytest

from tests.end_to_end.harness import Training, holdfast, training

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]
TRAINING = str(Path(__file__).with_name("training.py"))
DEADLINE_S = 120.0
STEPS, STEPS_PER_EPOCH = 48, 6
QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
LEASE = ["--lease", "30"]  # a function is traced in one go, and the machine may be busy
long = pytest.mark.skipif(os.environ.get("HOLDFAST_DRILLS") != "all", reason="a long test: HOLDFAST_DRILLS=all")
WAYS = [("loop", "tensorflow"), ("fit", "tensorflow"), ("fit", "jax"), ("fit", "torch")]


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (QUIET | {"KERAS_HOME": str(tmp_path / "keras")}).items():
        monkeypatch.setenv(name, value)


def use(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if find_spec("keras") is None or find_spec(backend) is None:
        pytest.skip(f"there is no Keras on {backend} here")
    monkeypatch.setenv("KERAS_BACKEND", backend)


def histories(log: str) -> set[str]:
    return {line.partition("history ")[2] for line in log.splitlines() if "history " in line}


def let_join(run: Training, held: int) -> int:
    """Hold the survivors until a new worker is there, then let them make a step at a time until it is a member."""
    before = set(run.pids)
    run.kill(run.members[0])  # the one that prints
    run.let_go(held)
    run.wait(lambda: bool(set(run.living_registered()) - before), "a new worker", DEADLINE_S)

    def joined() -> bool:
        nonlocal held
        if run.at(held, workers=2) and held < STEPS - 8:
            held += 1
            run.let_go(held)
        return len(run.living_members()) == 3

    run.wait(joined, "the new worker to be a member", DEADLINE_S)
    return held


def compare_files(one: Path, other: Path) -> None:
    """What callbacks have written on one worker, and on leaders of which one was killed in the second epoch."""
    import h5py  # comes with Keras

    rows = (one / "log.csv").read_text()
    assert (other / "log.csv").read_text() == rows and len(rows.splitlines()) == 1 + STEPS // STEPS_PER_EPOCH
    with h5py.File(one / "best.weights.h5") as best, h5py.File(other / "best.weights.h5") as same:
        names: list[str] = []
        best.visititems(lambda name, found: names.append(name) if isinstance(found, h5py.Dataset) else None)
        assert names and all(numpy.array_equal(best[name][()], same[name][()]) for name in names)


@pytest.mark.parametrize(("how", "backend"), WAYS)
def test_killed_joined_stopped_and_resumed(
    how: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(backend, monkeypatch)
    first, second = (tmp_path / name / "files" for name in ("alone", "several"))
    for folder in (first, second):
        folder.mkdir(parents=True)
    script = [TRAINING, how, "--steps", str(STEPS), "--files"]
    with training(tmp_path / "alone", "--workers", "1", *LEASE, script=[*script, str(first)]) as alone:
        digest = alone.finish(DEADLINE_S)
        expected = histories(alone.log())
        assert len(expected) == 1 and f"digest {digest}" in alone.log()
    place = str(tmp_path / "checkpoints")
    script += [str(second)]
    with training(tmp_path, "--workers", "3", *LEASE, "--checkpoint", place, script=script, held_at=8) as run:
        run.wait(lambda: run.at(8, workers=3), "three workers at step 8", DEADLINE_S)
        held = let_join(run, 11)
        held += 3 if (held + 2) % STEPS_PER_EPOCH == 0 else 2  # in the middle of an epoch
        run.let_go(held)
        run.wait(lambda: run.at(held, workers=3), "two of them and the new one", DEADLINE_S)
        assert run.agent is not None
        run.agent.send_signal(signal.SIGTERM)
        run.let_go(held + 2)
        assert run.agent.wait(DEADLINE_S) == 128 + signal.SIGTERM
    with training(tmp_path, "--workers", "2", *LEASE, "--checkpoint", place, script=script) as run:
        assert run.finish(DEADLINE_S) == digest
        assert histories(run.log()) == expected
        assert any(event["step"] >= held for event in run.events if event["kind"] == "resumed")
    if how == "fit":
        compare_files(first, second)


@pytest.mark.parametrize(("how", "backend"), [("loop", "tensorflow"), ("fit", "torch")])
def test_a_drill_finds_a_planted_nondeterminism(
    how: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(backend, monkeypatch)
    options = ["--workers", "2", "--spares", "0", "--for", "1s", "--kill-every", "1s"]
    options += ["--report", str(tmp_path / "drill.html")]
    done = holdfast("drill", *options, "--", TRAINING, how, "--planted", home=tmp_path, deadline_s=DEADLINE_S)
    assert done.returncode == 2, "the quiet run is not exact already"
    said = done.stdout + done.stderr
    assert "not exact: the gradient of" in said and "when the shard is computed again" in said
    assert "os.urandom(1)" in said, "the line is named"


@long
@pytest.mark.parametrize(("how", "backend"), WAYS)
def test_a_drill_with_kills_holds(how: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(backend, monkeypatch)
    options = ["--workers", "2", "--spares", "0", "--for", "8s", "--kill-every", "3s", "--seed", "1"]
    options += ["--report", str(tmp_path / "drill.html")]
    script = [TRAINING, how, "--steps", "900", "--pause", "0.02"]
    done = holdfast("drill", *options, "--", *script, home=tmp_path, deadline_s=DEADLINE_S)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
