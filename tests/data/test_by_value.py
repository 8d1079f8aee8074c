"""What a loader process hands over arrives as it was, by value or not."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import numpy
import pytest
import torch

from holdfast.data.by_value import SMALL_BYTES, Packed, packed

Pair = namedtuple("Pair", "x y")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(12).view(3, 4),
        torch.tensor(2.5),
        torch.tensor([True, False]),
        torch.randn(5).bfloat16(),
        torch.randn(3, dtype=torch.complex64),
        torch.empty(0, 3),
        torch.ones(SMALL_BYTES // 4 + 1),
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
    assert type(found["pair"]) is Pair and found["pair"].y.tolist() == [0, 1, 2]
    small = 0 < tensor.nelement() * tensor.element_size() <= SMALL_BYTES
    assert (found["x"].data_ptr() % 64 == 0) or not small
    assert found["x"].is_shared() is not small or not tensor.nelement()


def test_tensors_that_share_memory_go_on_to_do_so() -> None:
    whole = torch.arange(6)
    for batch in ([whole, whole.view(2, 3)], [whole[:3], whole[3:]]):
        assert packed(batch) is batch


def test_views_and_other_kinds_go_as_torch_sends_them() -> None:
    grad = torch.ones(2, requires_grad=True)
    for tensor in (torch.arange(6).view(2, 3).t(), torch.arange(6)[2:], grad, torch.eye(3).to_sparse()):
        sent = packed([tensor])
        found: Any = sent.batch()[0] if isinstance(sent, Packed) else sent[0]
        assert torch.equal(found.to_dense() if found.is_sparse else found, tensor.to_dense())
        assert found.requires_grad is tensor.requires_grad
        if not found.is_sparse:
            assert found.stride() == tensor.stride() and found.storage_offset() == tensor.storage_offset()


def test_what_cannot_be_pickled_is_left_to_the_data_loader() -> None:
    batch = [lambda: 0]
    assert packed(batch) is batch
