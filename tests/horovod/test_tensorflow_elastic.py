"""Horovod's elastic training with TensorFlow and Keras, with real kills, a stopped worker, and workers that come."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.horovod.test_elastic import Watched, lose

HERE = Path(__file__).parent
pytestmark = [
    pytest.mark.processes,
    pytest.mark.xdist_group("horovod"),
    pytest.mark.skipif(find_spec("tensorflow") is None, reason="TensorFlow is an extra"),
]


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watched]:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
    workers, training, *arguments = request.param
    run = Watched(tmp_path, workers, *arguments, training=HERE / training)
    run.start()
    try:
        yield run
    finally:
        run.end()


def one_state(run: Watched) -> None:
    """All ranks had the same weights after each batch of a world."""
    weights: dict[tuple[int, int], set[str]] = {}
    for line in run.lines():
        weights.setdefault((line.batch, line.size), set()).add(line.weight)
    assert all(len(found) == 1 for found in weights.values())


@pytest.mark.parametrize("run", [(3, "elastic_tensorflow.py", "100000", "0.02")], indirect=True, ids=["tape"])
def test_with_a_tape_any_rank_may_be_lost_stopped_or_added(run: Watched) -> None:
    lose(run, 0, signal.SIGKILL)
    lose(run, 2, signal.SIGKILL)
    lose(run, 1, signal.SIGSTOP)
    members = {line.pid for line in run.wait_for(3).values()}
    run.scale(4)
    ranks = run.wait_for(4)
    assert members < {line.pid for line in ranks.values()} and ranks[3].pid not in members
    one_state(run)


@pytest.mark.parametrize("run", [(2, "elastic_keras.py", "100000", "0.02")], indirect=True, ids=["fit"])
def test_fit_goes_on_when_a_rank_is_lost_stopped_or_added(run: Watched) -> None:
    lose(run, 0, signal.SIGKILL, size=2)
    lose(run, 1, signal.SIGKILL, size=2)
    lose(run, 1, signal.SIGSTOP, size=2)
    run.wait_for(2)
    run.scale(3)
    run.wait_for(3)
    one_state(run)
