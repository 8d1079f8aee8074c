"""Samplers: an epoch's order is a function of what was given, the seed and the epoch, in whichever way it is drawn."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import data

from holdfast.core.errors import ConfigError
from holdfast.data.sampling import Sampling
from holdfast.data.shards import ShardPlan

LENGTH = 40


class Curriculum:
    """Harder samples from epoch to epoch, as many in each."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 16

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randint(0, 10 + 4 * self.epoch, (16,)).tolist())


class Drawing:
    """Draws from a generator of its own, of any kind."""

    def __init__(self, draw: Callable[[Any], list[int]], generator: Any) -> None:
        self.draw = draw
        self.rng = generator

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        return iter(self.draw(self.rng))


class ShufflingItself:
    """Shuffles in place, so that each order depends on the one before."""

    def __init__(self) -> None:
        self.indices = list(range(LENGTH))

    def __len__(self) -> int:
        return LENGTH

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.indices)
        return iter(self.indices)


class ByLength:
    """Batches of unequal size, all samples in each epoch."""

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(LENGTH).tolist()
        return iter([order[:4], order[4:13], order[13:24], order[24:]])


def weighted(generator: torch.Generator | None = None) -> data.WeightedRandomSampler:
    weights = torch.linspace(0.1, 1, LENGTH).tolist()
    return data.WeightedRandomSampler(weights, 24, generator=generator)


SAMPLERS: dict[str, Callable[[], Any]] = {
    "weighted": weighted,
    "weighted, own generator": lambda: weighted(torch.Generator()),
    "random": lambda: data.RandomSampler(range(LENGTH)),
    "with replacement": lambda: data.RandomSampler(range(LENGTH), replacement=True, num_samples=64),
    "subset": lambda: data.SubsetRandomSampler(range(5, 35)),
    "curriculum": Curriculum,
    "python's generator": lambda: Drawing(lambda rng: rng.sample(range(LENGTH), LENGTH), random.Random()),
    "numpy's generator": lambda: Drawing(lambda rng: list(rng.permutation(LENGTH)), np.random.default_rng()),
    "numpy's old one": lambda: Drawing(lambda rng: list(rng.permutation(LENGTH)), np.random.RandomState()),
    "numpy's global one": lambda: Drawing(lambda rng: list(np.random.permutation(LENGTH)), None),
    "function": lambda: lambda epoch: torch.randperm(LENGTH)[: 16 + 8 * (epoch % 2)],
    "function, a sampler": lambda: lambda epoch: data.RandomSampler(range(LENGTH), generator=torch.Generator()),
}
FIXED: dict[str, Callable[[], Any]] = {
    "list": lambda: [3, 1, 2] * 8,
    "range": lambda: range(0, LENGTH, 2),
    "array": lambda: np.arange(LENGTH, dtype=np.int32),
    "tensor": lambda: torch.arange(LENGTH),
    "one with a seed of its own": lambda: data.DistributedSampler(range(LENGTH), num_replicas=1, rank=0),
}


def plan_of(made: Any, *, seed: int = 3, batches: bool = False, drop_last: bool = True) -> ShardPlan:
    sampling = Sampling(made, length=LENGTH, seed=seed, shards=4, batches=batches)
    return ShardPlan(LENGTH, sampling.largest or 8, 4, seed, drop_last, sampling=sampling).validate()


def everything(plan: ShardPlan, epochs: int = 3) -> list[list[int]]:
    return [plan.indices(step, shard) for step in range(plan.first_step(epochs)) for shard in range(4)]


def flat(lists: list[list[int]]) -> list[int]:
    return [index for indices in lists for index in indices]


@pytest.mark.parametrize("name", [*SAMPLERS, *FIXED])
def test_an_order_is_a_function_of_seed_and_epoch(name: str) -> None:
    """In another process, asked in another order, after other draws: the same. With another seed: another."""
    make = {**SAMPLERS, **FIXED}[name]
    torch.manual_seed(1)
    plan = plan_of(make())
    expected = everything(plan)
    torch.manual_seed(2)
    random.seed(2)
    np.random.seed(2)
    again = plan_of(make())
    steps = list(range(again.first_step(3)))
    backwards = {step: [again.indices(step, shard) for shard in range(4)] for step in reversed(steps)}
    assert [indices for step in steps for indices in backwards[step]] == expected
    assert again.sampling is not None and plan.sampling is not None
    assert again.sampling.digest == plan.sampling.digest
    assert (everything(plan_of(make(), seed=4)) == expected) == (name in FIXED)
    assert {type(index) for indices in expected for index in indices} == {int}


@pytest.mark.parametrize("name", SAMPLERS)
def test_the_processs_generators_do_not_notice(name: str) -> None:
    plan = plan_of(SAMPLERS[name]())
    for draws in (lambda: torch.rand(1).item(), random.random, np.random.random):
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        expected = draws()
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        plan.indices(plan.first_step(7), 0)
        assert draws() == expected


def test_the_samples_are_the_samplers() -> None:
    plan = plan_of(range(0, LENGTH, 2))
    assert plan.steps_per_epoch == 2  # of 20 samples, in batches of 8
    assert flat(everything(plan, 1)) == list(range(0, 32, 2))
    padded = plan_of(range(0, LENGTH, 2), drop_last=False)
    assert flat(everything(padded, 1)) == [*range(0, LENGTH, 2), 0, 2, 4, 6]


def test_a_weighted_sampler_follows_its_weights() -> None:
    weights = [0.0] * 20 + [1.0] * 20
    plan = plan_of(data.WeightedRandomSampler(weights, 4000))
    used = [index for indices in everything(plan, 1) for index in indices]
    assert len(used) == 4000 and min(used) == 20 and len(set(used)) == 20


def test_epochs_of_a_function_may_have_different_lengths() -> None:
    plan = plan_of(lambda epoch: range(8 * (epoch + 1)) if epoch < 4 else range(8))
    assert [plan.first_step(epoch) for epoch in range(6)] == [0, 1, 3, 6, 10, 11]
    assert [plan.epoch_of(step) for step in range(12)] == [0, 1, 1, 2, 2, 2, 3, 3, 3, 3, 4, 5]
    assert [step for step in range(12) if plan.ends_epoch(step)] == [0, 2, 5, 9, 10, 11]
    assert plan.indices(2, 0) == [8, 9] and plan.indices(5, 3) == [22, 23]
    assert plan_of(lambda epoch: range(8 * (epoch + 1))).epoch_of(9) == 3  # asked at once, as after a resume
    phases = [range(8), range(16)]  # and no more: what is not trained is not asked for
    plan = plan_of(lambda epoch: phases[epoch])
    assert plan.first_step(2) == 3 and plan.ends_epoch(2)


def test_batches_of_unequal_size_are_cut_as_evenly_as_can_be() -> None:
    plan = plan_of(ByLength(), batches=True)
    assert plan.steps_per_epoch == 4 and plan.batch_size == 16
    assert [plan.samples_in(step) for step in range(5)] == [4, 9, 11, 16, 4]
    assert [[len(plan.indices(step, shard)) for shard in range(4)] for step in range(3)] == [
        [1, 1, 1, 1],
        [3, 2, 2, 2],
        [3, 3, 3, 2],
    ]
    assert [plan.weight(1, shard) for shard in range(4)] == [12 / 9, 8 / 9, 8 / 9, 8 / 9]
    assert plan.weight(3, 0) == 1.0
    for epoch in range(2):
        steps = range(4 * epoch, 4 * epoch + 4)
        assert sorted(i for step in steps for shard in range(4) for i in plan.indices(step, shard)) == list(range(40))


@given(st.integers(1, 7), st.integers(0, 100))
def test_the_shards_of_a_batch_are_the_batch(shards: int, more: int) -> None:
    batch = list(range(shards + more))
    sampling = Sampling([batch], length=len(batch), seed=0, shards=shards, batches=True)
    plan = ShardPlan(len(batch), len(batch), shards, 0, sampling=sampling).validate()
    cut = [plan.indices(0, shard) for shard in range(shards)]
    assert flat(cut) == batch
    assert max(map(len, cut)) - min(map(len, cut)) <= 1
    assert sum(plan.weight(0, shard) for shard in range(shards)) == pytest.approx(shards)


def test_a_batch_sampler_of_torchs_own() -> None:
    inner = data.RandomSampler(range(LENGTH), generator=torch.Generator())
    make = lambda: data.BatchSampler(inner, 8, drop_last=True)  # noqa: E731
    assert everything(plan_of(make(), batches=True)) == everything(plan_of(make(), batches=True))


class Longer(Curriculum):
    def __iter__(self) -> Iterator[int]:
        return iter(range(16 + self.epoch))


@pytest.mark.parametrize(
    ("sampler", "batches", "sentence"),
    [
        (ShufflingItself, False, "the sampler gives another order when it is asked again for the same epoch"),
        (Longer, False, "the sampler gives 17 samples in epoch 1, and 16 in epoch 0"),
        (lambda: data.DistributedSampler(range(40), 4, 0), False, "the sampler has a DistributedSampler, which gives"),
        (
            lambda: data.BatchSampler(data.DistributedSampler(range(40), 4, 0), 4, drop_last=True),
            True,
            "the batch_sampler has a DistributedSampler, which gives each of 4 processes a part",
        ),
        (lambda: iter(range(9)), False, "the sampler, a range_iterator, has no length"),
        (lambda: (i for i in range(9)), False, "the sampler, a generator, has no length"),
        (lambda: data.RandomSampler, False, "sampler is the class RandomSampler"),
        (lambda: 3, False, "sampler is an int"),
        (lambda: [1.5] * 8, False, "the sampler gives a float, and is to give the numbers of samples"),
        (lambda: [[1, 2], [3, 4]], False, "the sampler gives a list, and is to give the numbers of samples"),
        (lambda: [1, 2, 40] * 8, False, "the sampler gives the index 40, and the dataset has 40 samples"),
        (lambda: [1, 2, -1] * 8, False, "the sampler gives the index -1, and the dataset has 40 samples"),
        (lambda: torch.rand(8), False, "the sampler gives an array of float32 with 1 dimensions"),
        (list, False, "the sampler gives nothing in epoch 0"),
        (lambda: [1, 2, 3], False, "the sampler gives epoch 0 3 samples, fewer than one batch of 8"),
        (lambda: lambda epoch: range(8 - epoch), False, "the sampler gives epoch 1 7 samples, fewer than one batch"),
        (list, True, "the batch_sampler gives nothing in epoch 0"),
        (lambda: range(8), True, "the batch_sampler gives an int, and is to give lists of indices"),
        (lambda: [range(8), range(3)], True, "batch 1 of epoch 0 has 3 samples, fewer than the 4 shards"),
        (lambda: [["a", "b", "c", "d"]], True, "the batch_sampler gives a str, and is to give the numbers of samples"),
    ],
)
def test_what_is_no_sampler(sampler: Callable[[], Any], batches: bool, sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        everything(plan_of(sampler(), batches=batches))
    assert caught.value.message.startswith(sentence)
    assert caught.value.hint
