"""A DataLoader as a run's data: every sample of an epoch in one update, whatever the sizes are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from holdfast import ConfigError
from holdfast.core.config import RunConfig
from holdfast.data import Stream
from holdfast.data.sampling import Sampling
from holdfast.engine.api.planning import planned
from holdfast.integrations.loaders.evaluating import Batches, can_be_shared_out
from holdfast.integrations.loaders.updates import Updates, training_data


class Counting(RandomSampler):
    """Another order in each epoch, which counts on by itself when it is gone through, as accelerate's does."""

    def __init__(self, samples: int) -> None:
        super().__init__(range(samples))
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Any:
        generator = torch.Generator().manual_seed(self.epoch)
        yield from torch.randperm(len(self), generator=generator).tolist()
        self.epoch += 1


@given(
    samples=st.integers(1, 200),
    batch=st.integers(1, 16),
    accumulation=st.integers(1, 5),
    shards=st.integers(1, 9),
    drop_last=st.booleans(),
)
def test_every_sample_is_in_one_update(
    samples: int, batch: int, accumulation: int, shards: int, drop_last: bool
) -> None:
    sampler = BatchSampler(SequentialSampler(range(samples)), batch, drop_last)
    updates = list(iter(Updates(sampler, accumulation=accumulation, shards=shards)))
    expected = [number for one in sampler for number in one]
    assert [number for update in updates for number in update] == expected
    assert all(len(update) >= shards for update in updates) or len(updates) == 1
    whole = batch * accumulation
    if whole >= shards:
        assert all(len(update) == whole for update in updates[:-1])


class Numbers:
    """A source whose sample n is n."""

    identity = ("Numbers",)

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def read(self, number: int) -> int:
        return number


@given(
    samples=st.integers(1, 120),
    batch=st.integers(1, 16),
    accumulation=st.integers(1, 5),
    shards=st.integers(1, 9),
    drop_last=st.booleans(),
    most=st.none() | st.integers(1, 12),
    times=st.integers(1, 3),
)
def test_a_stream_is_cut_into_the_updates_that_other_datasets_are(
    samples: int, batch: int, accumulation: int, shards: int, drop_last: bool, most: int | None, times: int
) -> None:
    """Every sample of its epoch once, in its own order, which is another one in the next; with limit and drop_last."""
    stream = Stream([Numbers(samples)], shuffle_buffer=16, block=2)
    loader = DataLoader(stream, batch_size=batch, drop_last=drop_last)
    ways = {"accumulation": accumulation, "shards": shards, "batches_max": most, "times": times}
    expected = [len(update) for update in Updates(loader.batch_sampler, **ways)]
    if not expected or min(expected) < shards:
        with pytest.raises(ConfigError, match="fewer than the"):
            training_data(loader, **ways)
        return
    data = training_data(loader, **ways)
    config = RunConfig(batch_size=shards, shards=shards, seed=3, length=samples, parameters=1)
    plan = planned(config, data.dataset, None, None, None)[1]
    assert data.steps_per_epoch == plan.steps_per_epoch == len(expected)
    for epoch in range(2):
        steps = range(plan.first_step(epoch), plan.first_step(epoch + 1))
        found = [[n for shard in range(shards) for n in plan.indices(step, shard)] for step in steps]
        assert [len(one) for one in found] == expected == [plan.samples_in(step) for step in steps]
        once = [number for one in found[::times] for number in one]
        assert once == stream.arranged(3, shuffle=True).numbers(epoch, 0, len(once))
        assert all(found[place] == found[place // times * times] for place in range(len(found)))
        for step in steps:
            assert sum(plan.weight(step, shard) for shard in range(shards)) == pytest.approx(shards)


def test_a_streams_order_is_not_taken_for_anothers() -> None:
    stream = Stream([Numbers(40)])
    weighted = torch.utils.data.WeightedRandomSampler([1.0] * 40, 40)
    for loader in (
        DataLoader(stream, batch_size=4, sampler=weighted),
        DataLoader(stream, batch_size=4, sampler=RandomSampler(range(40), replacement=True)),
    ):
        with pytest.raises(ConfigError, match="which has its own order"):
            training_data(loader, accumulation=1, shards=4)
    assert training_data(DataLoader(stream, batch_size=4, shuffle=True), accumulation=1, shards=4).steps_per_epoch == 10


def test_what_a_batch_sampler_drops_is_dropped() -> None:
    """As accelerate builds a loader anew: around a batch sampler, with no drop_last of its own."""
    stream = Stream([Numbers(43)])
    loader = DataLoader(stream, batch_sampler=BatchSampler(RandomSampler(stream), 4, True))
    assert not loader.drop_last
    data = training_data(loader, accumulation=1, shards=4)
    plan = planned(RunConfig(batch_size=4, shards=4, seed=3, length=43, parameters=1), data.dataset, None, None, None)[
        1
    ]
    assert data.steps_per_epoch == 10 and [plan.samples_in(step) for step in range(10)] == [4] * 10


def test_no_more_batches_than_asked_for() -> None:
    sampler = BatchSampler(SequentialSampler(range(40)), 4, False)
    updates = list(iter(Updates(sampler, accumulation=2, shards=2, batches_max=5)))
    assert [len(update) for update in updates] == [8, 8, 4]


def test_a_run_that_goes_on_has_what_is_left_of_the_epoch_in_its_order() -> None:
    def sampling(steps: int) -> Sampling:
        loader = DataLoader(list(range(64)), batch_sampler=BatchSampler(Counting(64), 4, False))
        data = training_data(loader, accumulation=4, shards=None)
        assert data.shards == 4 and data.steps_per_epoch == 4
        return Sampling(data.after(steps)["batch_sampler"], length=64, seed=5, shards=4, batches=True)

    whole, rest = sampling(0), sampling(6)
    assert rest.order(0).indices.tolist() == whole.order(1).indices.tolist()[32:]
    assert rest.order(1).indices.tolist() == whole.order(2).indices.tolist()


@pytest.mark.parametrize(("batch", "accumulation", "shards"), [(64, 1, 8), (6, 1, 6), (7, 1, 7), (3, 4, 4), (11, 1, 1)])
def test_shards_where_nobody_says_how_many(batch: int, accumulation: int, shards: int) -> None:
    loader = DataLoader(list(range(640)), batch_size=batch)
    assert training_data(loader, accumulation=accumulation, shards=None).shards == shards


class Endless(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(9))


@pytest.mark.parametrize(
    ("loader", "said"),
    [
        ([1, 2], "the training data is"),
        (DataLoader(Endless(), batch_size=2), "iterable dataset"),
        (DataLoader(list(range(9)), batch_size=None), "batch_size=None"),
        (
            DataLoader(
                list(range(9)),
                batch_size=2,
                sampler=torch.utils.data.DistributedSampler(list(range(9)), num_replicas=2, rank=0),
            ),
            "each of 2 processes",
        ),
    ],
)
def test_what_nobody_could_compute_again_is_refused(loader: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        training_data(loader, accumulation=1, shards=None)


def test_batches_of_an_evaluation_by_number() -> None:
    loader = DataLoader(torch.arange(10), batch_size=4)
    batches = Batches(loader)
    assert can_be_shared_out(loader) and len(batches) == 3 and batches.size_of(2) == 2
    assert [batch.tolist() for _, batch in map(batches.__getitem__, range(3))] == [one.tolist() for one in loader]
    assert len(Batches(loader, batches_max=2)) == 2
    assert not can_be_shared_out(DataLoader(torch.arange(10), batch_size=4, shuffle=True))
