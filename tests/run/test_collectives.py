"""Collectives of a view's members: the same bits on all of them, also when the first is lost in the middle."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import holdfast
from holdfast.core.errors import ConfigError
from holdfast.engine.collectives import Collectives
from tests.harness.forked import agreed, forked

pytestmark = [pytest.mark.processes, pytest.mark.timeout(120)]


TENTH = torch.tensor(0.1)
ROWS = [[float(number), TENTH.item()] for number in (1, 2, 3)]


def let_die_after(part: str) -> None:
    real = getattr(Collectives, part)

    def die(*arguments: Any) -> None:
        real(*arguments)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(Collectives, part, die)


def train(*, dies_after: str = "") -> list[Any]:
    """What came of each step's collectives. `dies_after`: the part of one in which the first worker dies, in step 2."""
    torch.manual_seed(3)
    model = nn.Linear(6, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    run = holdfast.join(model, optimizer, TensorDataset(torch.randn(64, 6)), batch_size=16, shards=4)
    collectives, found = run.engine.collectives, []
    own = torch.tensor([float(int(run.id[1]) + 1), 0.1])
    found.append(collectives.broadcast({"seed": own})["seed"].tolist())  # before the first step
    for step in run.steps(5):
        for (x,) in step:
            model(x).sum().backward()
        optimizer.step()
        if step.number == 2 and dies_after and run.leader:
            let_die_after(dies_after)
        total, mean = collectives.all_reduce(own), collectives.all_reduce(own, "mean")
        gathered = [one.tolist() for one in collectives.gather(own)]
        found.append([total.tolist(), mean.tolist(), gathered, collectives.broadcast(own * 2).tolist()])
    run.close()
    return found


def test_all_members_get_the_same() -> None:
    first, *steps = agreed(forked(train, workers=3))
    total = sum(map(torch.tensor, ROWS))
    for summed, mean, gathered, sent in steps:  # members are in the order in which they came
        assert summed == total.tolist() and mean == (total / 3).tolist()
        assert sorted(gathered) == ROWS and gathered[0] == first
        assert sent == (2 * torch.tensor(first)).tolist()


@pytest.mark.parametrize("part", ["each", "_tell"])
def test_the_first_is_lost_in_the_middle_and_the_others_agree(part: str) -> None:
    outcomes = forked(lambda: train(dies_after=part), workers=3)
    assert [outcome.signal for outcome in outcomes.values()].count(signal.SIGKILL) == 1
    first, *steps = agreed(outcomes)
    assert first not in steps[-1][2] and len(steps[-1][2]) == 2


def test_alone_it_is_its_own() -> None:
    found = agreed(forked(train, workers=1))
    assert found[1][0] == found[1][1] == ROWS[0]


def test_an_operation_that_there_is_not() -> None:
    def body() -> str:
        with pytest.raises(ConfigError, match="one of 'sum', 'mean'"):
            Collectives(None).all_reduce(torch.zeros(1), "max")  # type: ignore[arg-type]
        return "refused"

    assert body() == "refused"
