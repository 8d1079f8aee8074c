"""Iterables in real runs: the reader is killed, others join, all stop and go on; no bit and no sample is another."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path

import iterating
import pytest
from harness import DEADLINE_S, training

from holdfast.events import read_events
from tests.harness.forked import agreed, forked

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    "kind",
    [
        "stateful",
        pytest.param("plain", marks=pytest.mark.more),
        pytest.param("loader", marks=pytest.mark.more),
        pytest.param("huggingface", marks=pytest.mark.more),
    ],
)
def test_an_iterable_is_exact_and_every_sample_comes_once(kind: str, tmp_path: Path) -> None:
    """Of three workers the reader is killed and replaced; all leave; two others go on in the middle of an epoch."""
    seen = tmp_path / "seen"
    script = [str(Path(iterating.__file__)), "--kind", kind]
    expected = agreed(forked(lambda: iterating.main([*script[1:], "--seen", str(seen)]), workers=1, deadline_s=200))
    epochs = [Counter[int](), Counter[int](), Counter[int]()]
    for epoch, numbers in json.loads(seen.read_text()):
        epochs[epoch].update(numbers)
    assert epochs == [Counter(range(iterating.SAMPLES))] * 3

    options = ["--checkpoint", str(tmp_path / "checkpoints"), "--save-every", "100"]
    with training(tmp_path, "--workers", "3", *options, script=script, held_at=4) as run:
        run.wait(lambda: run.at(4, workers=3), "step 4", DEADLINE_S)
        reader = run.members[0]
        run.kill(reader)
        run.wait(lambda: len({*run.living_registered()} - {reader}) == 3, "a new one", DEADLINE_S)
        run.let_go(13)
        run.wait(lambda: run.at(13, workers=3), "step 13", DEADLINE_S)
        assert reader not in run.members
        assert run.agent is not None
        run.agent.send_signal(signal.SIGTERM)
        run.let_go(16)
        assert run.agent.wait(DEADLINE_S) == 128 + signal.SIGTERM
    with training(tmp_path, "--workers", "2", *options, script=script) as run:
        assert run.finish(DEADLINE_S) == expected
        events = list(read_events(run.directory.events))
        assert 13 <= [event["step"] for event in events if event["kind"] == "resumed"][-1] <= 16
        dropped = [event for event in events if event["kind"] == "warning" and "are dropped" in event["text"]]
        assert bool(dropped) == (kind in ("plain", "huggingface"))
