"""Samples by their number: rows of arrays, parts of batches, and batches that come one after the other."""

from __future__ import annotations

from collections.abc import Iterator

import numpy
import pytest

from holdfast.core.errors import ConfigError
from holdfast.integrations.variables.arrays import Batches, Pipeline, Rows, stacked, transformed


def test_rows_of_nested_arrays() -> None:
    rows = Rows(({"a": numpy.arange(6), "b": numpy.arange(12).reshape(6, 2)}, numpy.arange(6) * 10))
    ((inputs, labels),) = rows.__getitems__([4, 1])
    assert len(rows) == 6
    assert inputs["a"].tolist() == [4, 1] and inputs["b"].tolist() == [[8, 9], [2, 3]] and labels.tolist() == [40, 10]


def test_arrays_of_two_lengths_are_refused() -> None:
    with pytest.raises(ConfigError, match="the lengths 3, 4"):
        Rows((numpy.zeros(3), numpy.zeros(4)))


def test_parts_of_a_batch_are_the_batch() -> None:
    asked: list[int] = []

    def get(number: int) -> tuple[numpy.ndarray, numpy.ndarray]:
        asked.append(number)
        return numpy.arange(8) + 100 * number, numpy.arange(8)

    batches = Batches(get, count=3, shards=4)
    parts = [batches[index] for index in range(4, 8)]
    assert len(batches) == 12 and asked == [1]
    assert numpy.concatenate([x for x, _ in parts]).tolist() == list(range(100, 108))


def test_a_batch_that_cannot_be_cut_evenly_is_refused() -> None:
    batches = Batches(lambda number: (numpy.zeros(7),), count=1, shards=4)
    with pytest.raises(ConfigError, match="7 rows, which are not 4 equal shards"):
        batches[0]


def test_a_pipeline_goes_on_and_begins_again() -> None:
    begun: list[int] = []

    def start(number: int) -> Iterator[int]:
        begun.append(number)
        return iter(range(number, 5))

    pipeline = Pipeline(start, "it")
    assert [pipeline(number) for number in (1, 2, 4, 0, 1)] == [1, 2, 4, 0, 1]
    assert begun == [1, 0]
    with pytest.raises(ConfigError, match="it ended before its batch 7"):
        pipeline(7)


def test_samples_are_stacked_and_nothing_stays_nothing() -> None:
    x, y = stacked([([1, 2], 3), ([4, 5], 6)])
    assert x[0].tolist() == [1, 4] and y.tolist() == [3, 6]
    assert transformed((numpy.ones(2), None), lambda array: array * 2)[1] is None
