"""Samplers in a run: the same samples and the same bits for any number of workers, through a death and a joiner."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import dataset, mlp, sgd
from test_workers import let_in, wait_for_file
from torch import nn
from torch.nn import functional as F
from torch.utils import data

import holdfast
from holdfast.core.errors import ConfigError
from holdfast.drills.rig import Tracer
from tests.harness.forked import agreed, forked

Join = Callable[..., holdfast.Run]


class Buckets(data.Sampler[list[int]]):
    """Batches of 5 to 11 samples, which four shards do not divide."""

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(96).tolist()
        return iter([order[:5], order[5:16], order[16:26], order[26:33]])


def weighted() -> data.WeightedRandomSampler:
    return data.WeightedRandomSampler([1.0 + index % 5 for index in range(96)], 48)


def growing(epoch: int) -> list[int]:
    return torch.randperm(16 + 8 * epoch).tolist()


SAMPLERS: dict[str, Callable[[], dict[str, Any]]] = {
    "weighted": lambda: {"batch_size": 8, "sampler": weighted()},
    "weighted, fetched ahead": lambda: {"batch_size": 8, "sampler": weighted(), "num_workers": 1},
    "growing": lambda: {"batch_size": 8, "sampler": growing},
    "buckets": lambda: {"batch_sampler": Buckets()},
}


def train(join: Join, options: dict[str, Any], at_step: Callable[[int], None] = lambda step: None) -> Any:
    torch.manual_seed(0)
    training = sgd(mlp(nn.Dropout(0.2)))
    run = join(training.model, training.optimizer, dataset(), shards=4, seed=3, **options)
    told = []
    for step in run.epochs(3):
        at_step(step.number)
        for x, y in step:
            loss = F.cross_entropy(training.model(x), y)
            loss.backward()
            step.record(loss=loss)
        told.append((step.epoch, step.ends_epoch, step.samples, step.metrics["loss"]))
        training.optimizer.step()
    run.close()
    return [run.digest(), [list(one) for one in told[-3:]]]


@pytest.mark.processes
@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_death_and_a_joiner_change_no_bit(name: str, joined: Join, tmp_path: Path) -> None:
    """One of three workers dies in the second step; another comes, and draws the same orders."""
    expected = train(joined, SAMPLERS[name]())
    gone, came = tmp_path / "gone", tmp_path / "came"

    def victim(step: int) -> None:
        if step == 1:
            gone.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def survivor(step: int) -> None:
        if step >= 2:
            let_in("w0.2", came)

    def spare() -> Any:
        wait_for_file(gone)
        return train(holdfast.join, SAMPLERS[name](), lambda step: came.touch())

    bodies = {
        "w0.1": lambda: train(holdfast.join, SAMPLERS[name](), victim),
        "w1.1": lambda: train(holdfast.join, SAMPLERS[name](), survivor),
        "w2.1": lambda: train(holdfast.join, SAMPLERS[name](), survivor),
        "w0.2": spare,
    }
    outcomes = forked(bodies, size=3)
    assert outcomes["w0.1"].signal == signal.SIGKILL
    assert agreed(outcomes) == expected
    assert came.exists()


def test_the_gradient_is_the_mean_over_the_samples_of_an_uneven_batch(joined: Join) -> None:
    """As if the whole batch had been one: to rounding, not bit for bit."""
    training = sgd(mlp())
    samples = dataset()
    run = joined(training.model, training.optimizer, samples, shards=4, batch_sampler=[list(range(11)), list(range(5))])
    for step, size in zip(run.steps(2), (11, 5), strict=True):
        for x, y in step:
            F.cross_entropy(training.model(x), y).backward()
        found = [parameter.grad.clone() for parameter in training.model.parameters()]
        whole = F.cross_entropy(training.model(samples.tensors[0][:size]), samples.tensors[1][:size])
        expected = torch.autograd.grad(whole, list(training.model.parameters()))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
        assert step.samples == size
        training.optimizer.step()


def test_a_drill_learns_that_there_is_a_sampler(joined: Join, tmp_path: Path) -> None:
    training = sgd(mlp())
    run = joined(training.model, training.optimizer, dataset(), batch_size=8, shards=4, sampler=weighted())
    assert Tracer(run, tmp_path)._plan()["sampler"] is True


def test_elastic_mode_takes_a_sampler(joined: Join) -> None:
    options = {"batch_size": 8, "sampler": weighted(), "mode": holdfast.Elastic()}
    assert train(joined, options) == train(joined, {"batch_size": 8, "sampler": weighted()})


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"batch_size": 8, "sampler": [1] * 8, "batch_sampler": [[1] * 8]}, "join got a sampler and a batch_sampler"),
        ({"batch_size": 8, "batch_sampler": [[1] * 8]}, "join got batch_size=8, and a batch_sampler that says"),
        ({"sampler": [1] * 8}, "batch_size is None"),
        ({"drop_last": True, "batch_sampler": [[1] * 8]}, "join got drop_last=True, and a batch_sampler that says"),
        (
            {"batch_sampler": [[1] * 8], "mode": holdfast.Elastic()},
            "in elastic mode every epoch has",
        ),
        (
            {"batch_size": 8, "sampler": growing, "mode": holdfast.Elastic()},
            "in elastic mode every epoch has",
        ),
    ],
)
def test_what_does_not_go_together(joined: Join, options: dict[str, Any], sentence: str) -> None:
    training = sgd(mlp())
    with pytest.raises(ConfigError) as caught:
        joined(training.model, training.optimizer, dataset(), shards=4, **options)
    assert caught.value.message.startswith(sentence)


@pytest.mark.processes
def test_a_worker_whose_sampler_gives_another_order_is_not_let_in() -> None:
    """Weights that a script computes may differ: from a clock, from a set's order, from another copy of the data."""

    def body(weight: float) -> Any:
        weights = [1.0 + weight * index for index in range(96)]
        return train(holdfast.join, {"batch_size": 8, "sampler": data.WeightedRandomSampler(weights, 48)})

    outcomes = forked({"w0.1": lambda: body(1.0), "w1.1": lambda: body(2.0)}, size=1)
    errors = [outcome.error for outcome in outcomes.values() if outcome.error]
    assert len(errors) == 1
    assert "this worker's sampler or stream gives another order of samples than the run's" in errors[0]
