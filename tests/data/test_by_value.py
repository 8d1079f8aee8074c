"""What a loader process hands over arrives as it was, by value or not."""

from __future__ import annotations

from collections import namedtuple

import numpy
import pytest
import torch
from torch.utils.data import default_collate
from torch.utils.data._utils import worker

from holdfast.data.by_value import SMALL_BYTES, Packed, packed
from holdfast.data.fetching import ShardFetcher

Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12).view(3, 4),
        torch.tensor(2.5),
        torch.tensor([True, False]),
        torch.randn(5).bfloat16(),
        torch.randn(3, dtype=torch.complex64),
        torch.ones(SMALL_BYTES // 4),
        torch.arange(12).view(3, 4).t().contiguous(),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{tuple(tensor.shape)}",
)
def test_a_tensor_arrives_as_it_was(tensor: torch.Tensor) -> None:
    sent = packed({"x": tensor, "pair": Pair([1, "a"], numpy.arange(3))})
    assert isinstance(sent, Packed)
    found = sent.batch()
    assert torch.equal(found["x"], tensor) and found["x"].dtype == tensor.dtype
    assert found["x"].stride() == tensor.stride() and found["x"].shape == tensor.shape
    assert found["x"].data_ptr() % 64 == 0
    assert type(found["pair"]) is Pair and found["pair"].y.tolist() == [0, 1, 2]


def test_tensors_that_share_memory_go_on_to_do_so() -> None:
    whole = torch.arange(6)
    for batch in ([whole, whole.view(2, 3)], [whole[:3], whole[3:]]):
        assert packed(batch) is batch


def test_views_large_ones_and_other_kinds_go_as_torch_sends_them() -> None:
    grad, large = torch.ones(2, requires_grad=True), torch.ones(SMALL_BYTES // 4 + 1)
    whole = torch.arange(6)
    for tensor in (whole.view(2, 3).t(), whole[2:], grad, large, torch.eye(3).to_sparse(), torch.empty(0, 3)):
        batch = [tensor, torch.ones(2)]
        assert packed(batch) is batch


def test_a_small_batch_is_not_made_in_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a loader process, where default_collate would; and it is the same batch."""
    rows = [(torch.randn(3), number, {"y": numpy.arange(2) + number}) for number in range(4)]
    large = [torch.ones(SMALL_BYTES // 8 + 1) for _ in range(2)]
    expected = default_collate(rows)
    monkeypatch.setattr(worker, "_worker_info", worker.WorkerInfo(id=0, num_workers=1, seed=0, dataset=None))
    assert default_collate(rows)[0].is_shared()
    found = ShardFetcher(rows, 0, None).fetch(0, 0, [0, 1, 2, 3])
    for mine, theirs in zip((*found[:2], found[2]["y"]), (*expected[:2], expected[2]["y"]), strict=True):
        assert torch.equal(mine, theirs) and mine.dtype == theirs.dtype and not mine.is_shared()
    assert isinstance(packed(found), Packed)
    assert ShardFetcher(large, 0, None).fetch(0, 0, [0, 1]).is_shared()  # it goes as torch sends it


def test_what_cannot_be_pickled_is_left_to_the_data_loader() -> None:
    batch = [lambda: 0]
    assert packed(batch) is batch
