"""Models as people write them, bit for bit: a run of one is the plain loop, and many workers are a run of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import reference
from cases import CASES, Case, Training, dataset
from wild import WILD

import holdfast
from tests.harness.forked import agreed, forked

pytestmark = pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph")  # torch means well

BATCH = 24
ALL = CASES | WILD
Join = Callable[..., holdfast.Run]


def train(case: Case, join: Join, *, shards: int, **options: Any) -> tuple[Training, list[float]]:
    training = case.start()
    run = join(
        training.model,
        training.optimizer,
        dataset(),
        batch_size=BATCH,
        shards=shards,
        seed=reference.SEED,
        extras=training.extras,
        **options,
    )
    losses = []
    with case.around():
        for step in run.steps(case.steps):
            case.before(training, step.number)
            for batch in step:
                step.record(loss=case.shard(training, batch, step.number))
            losses.append(step.metrics["loss"])
            case.apply(training, step.number)
    run.close()
    return training, losses


@pytest.mark.parametrize("shards", [1, 3, 8])
@pytest.mark.parametrize("name", ALL)
def test_a_run_of_one_is_the_plain_loop(name: str, shards: int, joined: Join) -> None:
    case = ALL[name]
    training, losses = train(case, joined, shards=shards)
    expected, expected_losses = reference.train(case, shards=shards, batch=BATCH)
    assert losses == expected_losses
    assert reference.state_of(training) == reference.state_of(expected)


@pytest.mark.processes
@pytest.mark.parametrize("name", CASES)
def test_many_workers_are_a_run_of_one(name: str, joined: Join) -> None:
    """Three workers for six shards, then more workers than shards, in shared memory and over connections."""
    case = CASES[name]
    training, losses = train(case, joined, shards=6)
    expected = [reference.state_of(training), losses]

    def worker() -> Any:
        training, losses = train(case, holdfast.join, shards=6)
        return reference.state_of(training), losses

    assert agreed(forked(worker, workers=3)) == expected
    assert agreed(forked(worker, workers=8, path="network")) == expected
