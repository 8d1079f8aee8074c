"""Tests on the simulated device, which `make install` compiles. Each takes it in the state in which it found it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.harness import device as simulated

torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)  # imports torch._dynamo: once, not in every fork


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    assert request.path.stem.endswith("_cases"), (
        "after the first backward with a device no fork of this process computes"
    )
    if not simulated.is_built():
        pytest.skip("the simulated device is not compiled: make install does it, where g++ is")
    torch.set_num_threads(1)
    found = simulated.load()
    native = simulated.native()
    native.set_early(False)
    yield found
    native.set_early(False)
    native.forgive()
