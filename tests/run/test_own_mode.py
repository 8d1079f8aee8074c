"""A mode from outside the package, as docs/how-to/add-a-mode.md builds it: taken from that page, and exact."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import holdfast
from tests.harness.forked import agreed, forked

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "add-a-mode.md"
SHARDS, STEPS = 8, 6


def mode_of_the_page() -> holdfast.Exact:
    found: dict[str, Any] = {"__name__": "page"}
    exec(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0], found)
    return found["Median"]()  # type: ignore[no-any-return]


def train(*, dies_at: tuple[int, int] | None = None, width: int = 8, mode: Any = None) -> str:
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(96, 6), torch.randn(96, 1))
    model = nn.Sequential(nn.Linear(6, width), nn.BatchNorm1d(width), nn.Linear(width, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.4 / width, momentum=0.9)
    run = holdfast.join(model, optimizer, data, batch_size=24, shards=SHARDS, seed=1, mode=mode or mode_of_the_page())
    for step in run.steps(STEPS):
        for number, (x, y) in enumerate(step):
            ((model(x) - y) ** 2).mean().backward()
            if (step.number, number) == dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
    run.close()
    return run.digest()


def by_hand() -> list[torch.Tensor]:
    """The gradients of the first step: the median over shards, of each number by itself."""
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(96, 6), torch.randn(96, 1))
    model = nn.Linear(6, 1)
    run = holdfast.join(
        model, torch.optim.SGD(model.parameters(), lr=0.1), data, batch_size=24, mode=mode_of_the_page()
    )
    rows: list[list[torch.Tensor]] = []
    for step in run.steps(1):
        for x, y in step:
            ((model(x) - y) ** 2).mean().backward()
            rows.append([one.grad.clone() for one in model.parameters() if one.grad is not None])
        for number, one in enumerate(model.parameters()):
            assert one.grad is not None
            assert torch.equal(one.grad, torch.stack([row[number] for row in rows]).median(dim=0).values)
    run.close()
    return rows[0]


def test_the_gradient_is_what_the_mode_makes_of_the_shards() -> None:
    outcome = forked(lambda: len(by_hand()), workers=1)
    assert agreed(outcome) == 2


@pytest.mark.parametrize(("path", "width"), [("shared-memory", 8), ("shared-memory", 20_000), ("network", 8)])
def test_the_bits_are_the_same_for_any_number_of_workers_and_after_a_death(path: str, width: int) -> None:
    alone = agreed(forked(lambda: train(width=width), workers=1, path=path))
    bodies = {f"w{slot}.1": lambda: train(width=width) for slot in range(2)}
    bodies["w2.1"] = lambda: train(width=width, dies_at=(2, 1))
    outcomes = forked(bodies, path=path)
    assert outcomes["w2.1"].signal == signal.SIGKILL
    assert agreed(outcomes) == alone
    assert agreed(forked(lambda: train(width=width, mode=holdfast.Exact()), workers=2, path=path)) != alone


def test_hosts_combine_what_their_workers_bring_shard_by_shard() -> None:
    alone = agreed(forked(train, workers=1))
    outcomes = forked(dict.fromkeys(("w0.1@a", "w1.1@a", "w0.1@b"), train))
    assert agreed(outcomes) == alone


def test_a_worker_in_another_mode_is_told_so() -> None:
    outcomes = forked({"w0.1": lambda: train(mode=holdfast.Exact()), "w1.1": lambda: train()}, size=1)
    errors = [outcome.error for outcome in outcomes.values() if outcome.error]
    assert len(errors) == 1 and "mode=Median()" in errors[0] and "mode=Exact()" in errors[0]
