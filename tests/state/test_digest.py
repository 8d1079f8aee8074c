"""Digests: everything that matters counts, and nothing else."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from holdfast.state import digest
from holdfast.state.digest import digest_tensors, weights_digest


def test_names_dtypes_shapes_and_bits_count() -> None:
    zeros = torch.zeros(4)
    digests = [
        digest_tensors([]),
        digest_tensors([("a", zeros)]),
        digest_tensors([("b", zeros)]),
        digest_tensors([("a", zeros.view(2, 2))]),
        digest_tensors([("a", zeros.view(torch.int32))]),
        digest_tensors([("a", -zeros)]),
        digest_tensors([("a", zeros[:2]), ("a", zeros[2:])]),
        digest_tensors([("a", zeros[:0])]),
        digest_tensors([("a", zeros[0])]),
    ]
    assert len(set(digests)) == len(digests)
    assert all(len(digest) == 32 for digest in digests)


def test_strides_and_gradients_do_not_count() -> None:
    tensor = torch.randn(2, 3, 4, 5)
    expected = digest_tensors([("a", tensor)])
    assert digest_tensors([("a", tensor.to(memory_format=torch.channels_last))]) == expected
    assert digest_tensors([("a", torch.nn.Parameter(tensor))]) == expected
    assert digest_tensors([("a", torch.cat([tensor, tensor], 3)[..., :5])]) == expected
    for dtype in (torch.bfloat16, torch.bool, torch.float8_e5m2, torch.complex64):
        assert digest_tensors([("a", tensor.to(dtype))]) == digest_tensors([("a", tensor.to(dtype).clone())])


def test_a_model_has_one_digest_and_every_weight_and_buffer_changes_it() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[2].weight = model[0].weight
    before = weights_digest(model)
    assert weights_digest(model) == before
    seen = {before}
    for tensor in model.state_dict().values():
        tensor.add_(1)
        seen.add(weights_digest(model))
    assert len(seen) >= len(dict(model.named_parameters())) + len(dict(model.named_buffers())) + 1


def test_of_the_tensors_that_ranks_put_together_one_is_there_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each rank of a group held the whole model at the end of each loop."""
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    expected = weights_digest(model)
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[int] = []

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(sum(one() is not None for one in made))
        together = tensor.detach().clone()
        made.append(weakref.ref(together))
        return together

    monkeypatch.setattr(digest, "whole", whole)
    assert weights_digest(model) == expected
    assert alive == [0] * len(model.state_dict())


def test_the_digest_does_not_change_between_versions() -> None:
    tensor = torch.arange(4, dtype=torch.float32)
    assert digest_tensors([("weight", tensor)]) == "19fe0ce78f81e55419e1c82429ffdf5c"
