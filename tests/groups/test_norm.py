"""The norm whose bits do not depend on how many ranks the rows of a gradient are spread over."""

from __future__ import annotations

import math

import pytest
import torch

import holdfast
from holdfast.core.errors import ConfigError
from holdfast.engine.ranks.norm import _squares

SHAPES = [(1,), (5,), (57,), (57, 33), (3, 700_001), (11, 3, 5, 5), (1, 1)]


def with_gradients() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(4)
    found = []
    for shape in SHAPES:
        parameter = torch.nn.Parameter(torch.zeros(shape))
        parameter.grad = torch.randn(shape, generator=generator) * 10 ** torch.randint(
            -6, 6, shape, generator=generator
        )
        found.append(parameter)
    return [*found, torch.nn.Parameter(torch.zeros(3))]  # one has none


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_a_row_has_the_same_sum_wherever_it_is(ranks: int) -> None:
    for parameter in with_gradients():
        if (grad := parameter.grad) is None:
            continue
        chunk = -(-grad.shape[0] // ranks)  # as FSDP2 deals them out
        parts = [_squares(grad[start : start + chunk].clone()) for start in range(0, ranks * chunk, chunk)]
        assert torch.equal(torch.cat(parts), _squares(grad))


def test_it_is_the_norm_and_scales_to_it() -> None:
    mine, theirs = with_gradients(), with_gradients()
    norm = holdfast.clip_grad_norm_(mine, 2.0)
    expected = math.sqrt(sum(float((one.grad.double() ** 2).sum()) for one in theirs if one.grad is not None))
    assert math.isclose(norm.item(), expected, rel_tol=1e-6)
    torch.nn.utils.clip_grad_norm_(theirs, 2.0)
    for one, other in zip(mine, theirs, strict=True):
        assert (one.grad is None) is (other.grad is None)
        if one.grad is not None and other.grad is not None:
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=0.0)
    assert holdfast.clip_grad_norm_(mine, 3.0).item() <= 2.0001


def test_a_small_norm_changes_nothing_and_an_infinite_one_may_be_refused() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([0.3, 0.4])
    holdfast.clip_grad_norm_(parameter, 1.0)
    assert parameter.grad.tolist() == torch.tensor([0.3, 0.4]).tolist()
    parameter.grad = torch.tensor([math.inf, 0.4])
    with pytest.raises(ConfigError, match="the norm of the gradients is inf"):
        holdfast.clip_grad_norm_(parameter, 1.0, error_if_nonfinite=True)
