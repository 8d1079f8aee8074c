"""A DataLoader as arguments of holdfast.join: which samples are in an update of the model, in how many shards.

An update takes `accumulation` batches of the loader. Its samples, in the order of the loader's own sampler, are cut
into the run's shards; with as many shards as batches each shard is a batch. Every sample of an epoch is in exactly one
update: a rest that is too small to have a sample for each shard goes with the update before it. Owns nothing but the
loader.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from holdfast.core.errors import ConfigError
from holdfast.core.kinds import a_kind
from holdfast.data.arrangement import Arranged, Arrangement, CutArrangement
from holdfast.data.epoch_cut import EpochCut

SHARDS = 8  # at most, where nobody says how many


class Updates:
    """A batch sampler for join: the samples of each update. `batches_max`: of the loader, in an epoch.

    `times`: so many updates are made with the same samples, one after the other.
    """

    def __init__(
        self, batch_sampler: Any, *, accumulation: int, shards: int, batches_max: int | None = None, times: int = 1
    ) -> None:
        self.batch_sampler = batch_sampler  # under this name join finds it, tells it the epoch and seeds it
        self._accumulation = accumulation
        self._shards = shards
        self._batches_max = batches_max
        self._times = times

    def __iter__(self) -> Iterator[list[int]]:
        return (update for update in self._once() for _ in range(self._times))

    def _once(self) -> Iterator[list[int]]:
        held: list[int] = []
        group: list[int] = []
        for count, batch in enumerate(self.batch_sampler, 1):
            if self._batches_max is not None and count > self._batches_max:
                break
            group += batch
            if count % self._accumulation == 0 and len(group) >= self._shards:
                if held:
                    yield held
                held, group = group, []
        if held and len(group) < self._shards:
            held, group = held + group, []
        yield from (update for update in (held, group) if update)

    def __len__(self) -> int:
        with torch.random.fork_rng(devices=[]):
            return sum(1 for _ in self)


class InUpdates(Dataset[Any], Arranged):
    """A stream whose epochs are cut into a trainer's updates."""

    comes_in_steps = True

    def __init__(self, dataset: Any, cut: EpochCut) -> None:
        self._dataset, self._cut = dataset, cut

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, number: int) -> Any:
        return self._dataset[number]

    def arranged(self, seed: int, *, shuffle: bool) -> Arrangement:
        return CutArrangement(self._dataset.arranged(seed, shuffle=shuffle), self._cut)


class LaterUpdates:
    """The same for a run that goes on from a trainer's own checkpoint: its epoch 0 is the rest of epoch `epoch`."""

    def __init__(self, updates: Updates, *, epoch: int, update: int) -> None:
        self._updates = updates
        self._epoch = epoch
        self._update = update

    def __call__(self, epoch: int) -> list[list[int]]:
        real = self._epoch + epoch
        sampler = self._updates.batch_sampler
        for part in (sampler, getattr(sampler, "sampler", None)):
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(real)
        found = list(iter(self._updates))  # not of itself, whose length would be asked for: that draws an order, too
        return found[self._update if epoch == 0 else 0 :]


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """What join is given, and how many updates an epoch has."""

    dataset: Any
    shards: int
    steps_per_epoch: int
    options: dict[str, Any] = field(default_factory=dict)

    def after(self, steps: int) -> dict[str, Any]:
        """The options of a run that goes on where a checkpoint of the trainer's own is, after so many updates."""
        updates = self.options.get("batch_sampler")
        if not steps:
            return self.options
        if updates is None:
            raise ConfigError(
                "a stream cannot go on from a trainer's own checkpoint", hint="holdfast run --checkpoint DIR goes on"
            )
        epoch, update = divmod(steps, self.steps_per_epoch)
        return {**self.options, "batch_sampler": LaterUpdates(updates, epoch=epoch, update=update)}


def shards_of(shards: int | None, *, batch_size: int, accumulation: int) -> int:
    """Where nobody says: each accumulated batch is a shard; without accumulation a batch is cut into up to eight."""
    if shards is not None:
        if type(shards) is not int or shards < 1:
            raise ConfigError(f"shards is {shards!r:.40}", hint="a step has at least 1 shard, and usually 8 to 64")
        return shards
    if accumulation > 1:
        return accumulation
    return max(number for number in range(1, SHARDS + 1) if batch_size % number == 0)


def training_data(
    loader: Any,
    *,
    accumulation: int,
    shards: int | None,
    batches_max: int | None = None,
    times: int = 1,
    iterable_steps: int = 0,
) -> TrainingData:
    """ConfigError where a lost worker's part of an update could not be computed again from the loader's dataset.

    `iterable_steps`: what the trainer takes for an epoch of an iterable dataset, which has no length; 0: it takes none.
    """
    if not isinstance(loader, DataLoader):
        raise ConfigError(
            f"the training data is {a_kind(loader)}", hint="give one torch.utils.data.DataLoader over a dataset"
        )
    dataset = loader.dataset
    if loader.batch_size is None and loader.batch_sampler is None:
        raise ConfigError(
            "the DataLoader has batch_size=None, so nobody knows which samples are in a batch",
            hint="DataLoader(dataset, batch_size=...), with a dataset that gives single samples",
        )
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", 0) or 0
    count = shards_of(shards, batch_size=size or 1, accumulation=accumulation)
    if isinstance(dataset, IterableDataset):
        if not iterable_steps:
            raise ConfigError(
                "the trainer counts an epoch's batches beforehand, and an iterable dataset has no length",
                hint="use a map-style dataset with __len__ and __getitem__, or holdfast.data.Stream over its files",
            )
        given = {"batch_size": size * accumulation, "drop_last": loader.drop_last, "collate_fn": loader.collate_fn}
        return TrainingData(dataset=dataset, shards=count, steps_per_epoch=iterable_steps, options=given)
    options: dict[str, Any] = {
        "collate_fn": loader.collate_fn,
        "num_workers": loader.num_workers,
        "prefetch_factor": loader.prefetch_factor if loader.num_workers else None,
        "worker_init_fn": loader.worker_init_fn,
    }
    if isinstance(dataset, Arranged):
        cut = _cut_of(loader, accumulation=accumulation, shards=count, batches_max=batches_max, times=times)
        return TrainingData(dataset=InUpdates(dataset, cut), shards=count, steps_per_epoch=cut.steps, options=options)
    updates = Updates(_batches(loader), accumulation=accumulation, shards=count, batches_max=batches_max, times=times)
    options["batch_sampler"] = updates
    return TrainingData(dataset=dataset, shards=count, steps_per_epoch=len(updates), options=options)


def _cut_of(
    loader: DataLoader[Any], *, accumulation: int, shards: int, batches_max: int | None, times: int
) -> EpochCut:
    """How an epoch of a stream is cut into updates. The order in it is the stream's own."""
    sampler: Any = loader.batch_sampler
    inner = getattr(sampler, "sampler", None)
    usual = type(inner) in (SequentialSampler, RandomSampler) or type(inner).__name__ == "SeedableRandomSampler"
    if not usual or getattr(inner, "replacement", False):
        raise ConfigError(
            f"the DataLoader has {a_kind(sampler if inner is None else inner)} for a stream, which has its own order",
            hint="DataLoader(stream, batch_size=...); weights of several streams are holdfast.data.Mixture's",
        )
    length, size = len(loader.dataset), int(sampler.batch_size)  # type: ignore[arg-type]
    batches = length // size if sampler.drop_last else -(-length // size)
    if batches_max is not None:
        batches = min(batches, batches_max)
    places = min(length, batches * size)
    return EpochCut(places, size * accumulation, shards, times).validate()


def _batches(loader: DataLoader[Any]) -> Any:
    """The loader's own batches, by samples' numbers."""
    sampler: Any = loader.batch_sampler
    replicas = getattr(getattr(sampler, "sampler", None), "num_replicas", 1)
    if replicas != 1:
        raise ConfigError(
            f"the DataLoader has a sampler that gives each of {replicas} processes a part of the samples",
            hint="leave the DistributedSampler out: Holdfast spreads the samples over the workers itself",
        )
    return sampler
