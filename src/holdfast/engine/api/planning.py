"""What join makes of a dataset: which samples are in which shard, and the loader that fetches them.

Owns nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from torch.utils.data import DataLoader

from holdfast.core.config import HANDED, RunConfig
from holdfast.core.errors import ConfigError
from holdfast.core.kinds import a_kind
from holdfast.data.arrangement import Arranged
from holdfast.data.iterables.handed import HandedBatches, Packing
from holdfast.data.iterables.plan import HandedLoader, HandedPlan
from holdfast.data.iterables.reader import Reader, is_iterable
from holdfast.data.loader import BatchLoader, ShardLoader
from holdfast.data.sampling import Sampling
from holdfast.data.shards import ShardPlan
from holdfast.state.objects import object_bytes, object_from_bytes


def samples_of_step(batch_size: Any, batch_sampler: Any, dataset: Any, shards: Any) -> Any:
    """As the run's settings begin with it: where batches come as such, one sample a shard stands for them."""
    comes_in_batches = batch_size is None and is_iterable(dataset)
    comes_in_batches |= batch_size is None and isinstance(dataset, Arranged) and dataset.comes_in_steps
    return shards if batch_sampler is not None or comes_in_batches else batch_size


def planned(
    config: RunConfig, dataset: Any, batch_size: int | None, sampler: Any, batch_sampler: Any
) -> tuple[RunConfig, ShardPlan]:
    """Which samples are in which shard, and the run's settings with the order that a sampler or a stream gives them."""
    if sampler is not None and batch_sampler is not None:
        raise ConfigError(
            "join got a sampler and a batch_sampler", hint="a batch_sampler has its own: leave out sampler"
        )
    if batch_sampler is not None and (batch_size is not None or config.drop_last):
        both = f"batch_size={batch_size!r}" if batch_size is not None else "drop_last=True"
        raise ConfigError(
            f"join got {both}, and a batch_sampler that says how large each batch is",
            hint=f"leave out {both.partition('=')[0]}",
        )
    if is_iterable(dataset):
        return _handed(config, dataset, batch_size, given=sampler is not None or batch_sampler is not None)
    sampling = arrangement = None
    seed = config.seed if config.order_seed is None else config.order_seed
    given = sampler if batch_sampler is None else batch_sampler
    if given is not None:
        batches = batch_sampler is not None
        sampling = Sampling(given, length=config.length, seed=seed, shards=config.shards, batches=batches)
        largest = sampling.largest if batches else config.batch_size
        config = replace(config, order=sampling.digest, batches=batches, batch_size=largest)
    elif isinstance(dataset, Arranged):
        arrangement = dataset.arranged(seed, shuffle=config.shuffle)
        config = replace(config, order=arrangement.digest)
        if arrangement.cut is not None:
            config = replace(config, batches=True, batch_size=arrangement.cut.largest)
    cut = {one.name: getattr(config, one.name) for one in fields(ShardPlan) if hasattr(config, one.name)}
    return config, ShardPlan(**cut, sampling=sampling, arrangement=arrangement).validate()


def _handed(config: RunConfig, dataset: Any, batch_size: int | None, *, given: bool) -> tuple[RunConfig, ShardPlan]:
    """Of an iterable, which one worker reads for all."""
    if given:
        raise ConfigError(
            f"{a_kind(dataset)} gives its samples in its own order, and join got a sampler for them",
            hint="leave out the sampler, or use a dataset with __len__ and __getitem__",
        )
    if batch_size is not None and getattr(dataset, "batch_size", None) is not None and isinstance(dataset, DataLoader):
        raise ConfigError(
            f"the {type(dataset).__name__} makes batches of {dataset.batch_size}, and join got batch_size={batch_size}",
            hint="leave out batch_size of join; or build the loader with batch_size=None, so that it gives samples",
        )
    config = replace(config, order=HANDED, batches=batch_size is None)
    seed = config.seed if config.order_seed is None else config.order_seed
    reader = Reader(dataset, batch_size=batch_size, shards=config.shards, seed=seed, drop_last=config.drop_last)
    batches = HandedBatches(reader, Packing(object_bytes, object_from_bytes))
    names = [one.name for one in fields(ShardPlan) if hasattr(config, one.name)]
    cut = {name: getattr(config, name) for name in names}
    return config, HandedPlan(**cut, handed=batches, comes_in_batches=batch_size is None)


def loader_of(
    dataset: Any, plan: ShardPlan, collate_fn: Callable[[list[Any]], Any] | None, *, pinned: bool, **ahead: Any
) -> BatchLoader:
    """`ahead`: what join was told of loader processes. `pinned`: see ShardLoader."""
    if not isinstance(plan, HandedPlan):
        return ShardLoader(dataset, plan, collate_fn=collate_fn, pinned=pinned, **ahead)
    asked = [f"{name}={value!r:.40}" for name, value in ahead.items() if value]
    if asked:
        raise ConfigError(
            f"join got {asked[0]}, and {a_kind(dataset)} is read by one worker in its own process",
            hint="let it read ahead itself: torchdata's StatefulDataLoader(dataset, batch_size=None, num_workers=...)",
        )
    comes_in_batches = plan.comes_in_batches
    if comes_in_batches and collate_fn is not None:
        raise ConfigError(
            "join got a collate_fn and no batch_size, so that the iterable gives whole batches",
            hint="give batch_size=... if it gives samples; else collate them where the batches are made",
        )
    return HandedLoader(plan, collate_fn, collates=not comes_in_batches)
