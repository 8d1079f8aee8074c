"""Samples by their number, for frameworks that think in arrays: nested arrays with rows, or batches as they come.

    Rows       arrays of one length, in any nesting of tuples, lists and dicts; a shard is a selection of their rows
    Batches    whole batches by number, such as a keras.utils.PyDataset; a shard is a part of one
    Pipeline   batches that come one after the other, such as a tf.data.Dataset; every worker goes through all of them

Each is a dataset for holdfast.join, and `__getitems__` gives a shard at once; `first` is its collate function.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy

from holdfast.core.errors import ConfigError


def first(samples: Sequence[Any]) -> Any:
    """A collate function for what is a batch already."""
    return samples[0]


def stacked(samples: Sequence[Any]) -> Any:
    """A collate function for samples of any map-style dataset: arrays with one more dimension in front."""
    one = samples[0]
    if isinstance(one, dict):
        return {key: stacked([sample[key] for sample in samples]) for key in one}
    if isinstance(one, (tuple, list)):
        return tuple(stacked(column) for column in zip(*samples, strict=True))
    return numpy.stack([numpy.asarray(sample) for sample in samples])


def transformed(value: Any, change: Callable[[Any], Any]) -> Any:
    """Every array of a nesting; None stays None."""
    if value is None:
        return None
    if isinstance(value, dict):
        return {key: transformed(item, change) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)([transformed(item, change) for item in value])
    return change(value)


def leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        for item in value.values():
            yield from leaves(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from leaves(item)
    elif value is not None:
        yield value


class Rows:
    """See the module."""

    def __init__(self, arrays: Any) -> None:
        self.arrays = transformed(arrays, numpy.asarray)
        lengths = [len(one) if one.ndim else -1 for one in leaves(self.arrays)]
        if not lengths or len(set(lengths)) > 1 or lengths[0] < 0:
            raise ConfigError(
                f"the arrays have the lengths {', '.join(map(str, lengths)) or 'of nothing'}",
                hint="give arrays that all have one row for each sample, such as (x, y)",
            )
        self._length = lengths[0]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        return transformed(self.arrays, lambda array: array[index])

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [transformed(self.arrays, lambda array: array[numpy.asarray(indices)])]


class Batches:
    """`get` gives a batch by its number in the epoch. Sample number n is part n % shards of batch n // shards."""

    def __init__(self, get: Callable[[int], Any], count: int, shards: int) -> None:
        self._get = get
        self._count = count
        self._shards = shards
        self._last: tuple[int, Any] = (-1, None)

    def __len__(self) -> int:
        return self._count * self._shards

    def __getitem__(self, index: int) -> Any:
        number, part = divmod(index, self._shards)
        if self._last[0] != number:
            self._last = (number, transformed(self._get(number), numpy.asarray))
        batch = self._last[1]
        rows = {len(array) for array in leaves(batch)}
        size = next(iter(rows), 0)
        if len(rows) != 1 or size % self._shards or not size:
            raise ConfigError(
                f"batch {number} has {'/'.join(map(str, sorted(rows))) or 'no'} rows, which are not {self._shards} "
                "equal shards",
                hint="let every batch have a multiple of `shards` rows; drop what is left over at the end",
            )
        step = size // self._shards
        return transformed(batch, lambda array: array[part * step : (part + 1) * step])

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return [self[index] for index in indices]


class Pipeline:
    """Batches by number from something that gives them in one order: goes on from where it is, or begins again."""

    def __init__(self, start: Callable[[int], Iterator[Any]], what: str) -> None:
        self._start = start
        self._what = what
        self._position = -1
        self._iterator: Iterator[Any] = iter(())

    def __call__(self, number: int) -> Any:
        if self._position < 0 or number < self._position:
            self._iterator, self._position = self._start(number), number
        while True:
            batch = next(self._iterator, None)
            self._position += 1
            if batch is None:
                raise ConfigError(
                    f"{self._what} ended before its batch {number}", hint="its length must be the same every time"
                )
            if self._position > number:
                return batch


def is_pipeline(dataset: Any) -> bool:
    """A tf.data.Dataset, told by what it can do: TensorFlow may not be there."""
    return hasattr(dataset, "as_numpy_iterator") and hasattr(dataset, "cardinality")


def shuffles_anew(dataset: Any) -> bool:
    """Whether a tf.data.Dataset can be seen to have another order each time, or on each worker."""
    if hasattr(dataset, "_reshuffle_each_iteration"):  # it is a shuffle, and None is True
        seeded = any(int(getattr(dataset, name, 1)) for name in ("_seed", "_seed2"))
        if dataset._reshuffle_each_iteration is not False or not seeded:
            return True
    return any(map(shuffles_anew, getattr(dataset, "_inputs", tuple)()))


def batches_of_pipeline(dataset: Any, shards: int) -> Batches:
    """Every worker reads all of it, in its one order, and takes the rows of its shards."""
    count = int(dataset.cardinality())
    if count < 1:
        raise ConfigError(
            "the tf.data.Dataset does not say how many batches it has",
            hint="dataset.apply(tf.data.experimental.assert_cardinality(count)), without repeat()",
        )
    if shuffles_anew(dataset):
        warnings.warn(
            "the tf.data.Dataset has another order whenever it is read, and every worker reads it by itself: give its "
            "shuffle a seed, and reshuffle_each_iteration=False",
            stacklevel=2,
        )
    start = lambda number: iter(dataset.skip(number).as_numpy_iterator())  # noqa: E731
    return Batches(Pipeline(start, "the tf.data.Dataset"), count, shards)
