"""A TensorDataset's batch that is made in one go is the one that its samples and default_collate would have made."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Subset, TensorDataset, default_collate

from holdfast.data.fetching import ShardFetcher, rows_at_once

TYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.uint8, torch.bool)


def tensor_of(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 9).to(dtype)


@given(
    shapes=st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), min_size=1, max_size=3),
    dtype=st.sampled_from(TYPES),
    indices=st.lists(st.integers(0, 6), min_size=1, max_size=9),
)
def test_the_same_values_types_and_strides(shapes: list, dtype: torch.dtype, indices: list[int]) -> None:
    dataset = TensorDataset(*(tensor_of((7, *shape), dtype) for shape in shapes))
    expected = default_collate([dataset[index] for index in indices])
    made = rows_at_once(dataset, indices)
    assert made is not None and type(made) is type(expected)
    for mine, theirs in zip(made, expected, strict=True):
        assert mine.dtype == theirs.dtype and mine.shape == theirs.shape and mine.stride() == theirs.stride()
        assert torch.equal(mine, theirs)
        assert (mine.storage_offset() == 0 and mine.data_ptr() % 64 == 0) or not mine.numel()


def test_a_changed_batch_leaves_the_dataset_alone() -> None:
    dataset = TensorDataset(torch.zeros(4, 2))
    fetcher = ShardFetcher(dataset, 0, None)
    fetcher.fetch(0, 0, [0, 1, 2, 3])[0].fill_(1.0)
    assert not dataset.tensors[0].any()


class Doubling(TensorDataset):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
        return tuple(2 * tensor for tensor in super().__getitem__(index))


@pytest.mark.parametrize(
    "dataset",
    [
        Doubling(torch.ones(4, 2)),
        Subset(TensorDataset(torch.ones(4, 2)), [3, 2, 1, 0]),
        TensorDataset(torch.ones(2, 4).t()),
        TensorDataset(torch.ones(4, 2, requires_grad=True)),
        TensorDataset(torch.nn.Parameter(torch.ones(4, 2))),
        TensorDataset(torch.ones(4, 2, dtype=torch.complex64)),
    ],
    ids=["a subclass", "a subset", "transposed", "with gradients", "a parameter", "complex"],
)
def test_others_go_sample_by_sample(dataset: TensorDataset) -> None:
    assert rows_at_once(dataset, [0, 1]) is None
    expected = default_collate([dataset[index] for index in (0, 1)])
    for mine, theirs in zip(ShardFetcher(dataset, 0, None).fetch(0, 0, [0, 1]), expected, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("indices", [[], [-1], [4], [True], [torch.tensor(1)]], ids=str)
def test_unusual_indices_are_left_to_the_dataset(indices: list) -> None:
    assert rows_at_once(TensorDataset(torch.ones(4, 2)), indices) is None
