"""Streams of token and tar files in real runs: a kill, a joiner, a stop and other workers change no bit."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path

import pytest
import streaming
from harness import DEADLINE_S, training

from holdfast.events import read_events
from holdfast.testing.observed_run import ObservedRun, send
from tests.harness.forked import agreed, forked

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]


@pytest.mark.parametrize("kind", ["tokens", pytest.param("tar", marks=pytest.mark.more)])
def test_a_stream_is_exact_and_uses_every_sample_once(kind: str, tmp_path: Path) -> None:
    """Three workers, of which one is killed and replaced; all leave; two others go on in the middle of an epoch."""
    data, seen = tmp_path / "data", tmp_path / "seen"
    streaming.write(kind, data)
    script = [str(Path(streaming.__file__)), "--data", str(data)]
    expected = agreed(forked(lambda: streaming.main([*script[1:], "--seen", str(seen)]), workers=1))
    epochs = [Counter[int](), Counter[int](), Counter[int]()]
    for epoch, numbers in json.loads(seen.read_text()):
        epochs[epoch].update(numbers)
    filled = -streaming.SAMPLES % 12
    for epoch in epochs:
        assert set(epoch) == set(range(streaming.SAMPLES))
        assert sorted(epoch.values()) == [1] * (streaming.SAMPLES - filled) + [2] * filled

    options = ["--checkpoint", str(tmp_path / "checkpoints"), "--save-every", "100"]
    with training(tmp_path, "--workers", "3", *options, script=script, held_at=4) as run:
        run.wait(lambda: run.at(4, workers=3), "step 4", DEADLINE_S)
        victim = run.members[0]
        run.kill(victim)
        run.wait(lambda: len({*run.living_registered()} - {victim}) == 3, "a new one", DEADLINE_S)
        run.let_go(13)
        run.wait(lambda: run.at(13, workers=3), "step 13", DEADLINE_S)
        assert victim not in run.members
        assert run.agent is not None
        run.agent.send_signal(signal.SIGTERM)
        run.let_go(16)
        assert run.agent.wait(DEADLINE_S) == 128 + signal.SIGTERM
    with training(tmp_path, "--workers", "2", *options, script=script) as run:
        assert run.finish(DEADLINE_S) == expected
        resumed = [event["step"] for event in read_events(run.directory.events) if event["kind"] == "resumed"]
        assert 13 <= resumed[-1] <= 16


def mixed(home: Path, workers: int) -> str:
    """The digest of the example's mixture of packed documents and tokens; of several workers the leader is killed."""
    words = ["--data", str(home / "tokens"), "--from", "mixed", "--files", "3", "--epochs", "1", "--width", "16"]
    example = Path(__file__).parents[2] / "examples" / "tokens.py"
    slow = ["--slow", "0.02" if workers > 1 else "0"]
    run = ObservedRun(home, f"run{workers}", ["--workers", str(workers)], [str(example), *words, *slow])
    run.start()
    try:
        if workers > 1:
            run.wait(lambda: run.step >= 4 and len(run.living_members()) == workers, "workers that train", DEADLINE_S)
            send(run.pids[run.members[0]], signal.SIGKILL)
        return run.finish(DEADLINE_S)
    finally:
        run.end()


@pytest.mark.more
def test_packed_documents_in_a_mixture_are_exact(tmp_path: Path) -> None:
    assert mixed(tmp_path, 1) == mixed(tmp_path, 3)
