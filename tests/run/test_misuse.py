"""Scripts that hardly mean what they do are told so, once; scripts that do mean it are not."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import holdfast

STEPS = 25


class Training:
    """A script by hand, with what tests change in it."""

    def __init__(self, **join: Any) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        data = TensorDataset(torch.randn(256, 4), torch.randint(0, 2, (256,)))
        self.run = holdfast.join(self.model, self.optimizer, data, batch_size=8, shards=4, **join)

    def go(
        self,
        *,
        inside: Callable[[torch.Tensor], Any] = torch.Tensor.backward,
        after: Callable[[int], Any] | None = None,
    ) -> list[str]:
        """The warnings. `inside(loss)` in the loop over shards, `after(step)` behind it."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in self.run.steps(STEPS):
                for x, y in step:
                    inside(F.cross_entropy(self.model(x), y))
                if after is None:
                    self.optimizer.step()
                else:
                    after(step.number)
            self.run.close()
        return [str(one.message) for one in caught if "holdfast: " in str(one.message)]


def test_an_ordinary_script_is_not_warned() -> None:
    assert not Training().go()


def test_a_script_that_never_steps_is_told() -> None:
    (said,) = Training().go(after=lambda step: None)
    assert "optimizer.step() was not called in the first 20 steps" in said


def test_a_script_that_steps_every_few_steps_is_not_told() -> None:
    training = Training()
    assert not training.go(after=lambda step: training.optimizer.step() if step % 8 == 7 else None)


def test_a_script_that_steps_twice_is_told_once() -> None:
    training = Training()

    def twice(step: int) -> None:
        training.optimizer.step()
        training.optimizer.step()

    (said,) = training.go(after=twice)
    assert "optimizer.step() was called 2 times in step 0" in said


def test_a_script_without_backward_is_told() -> None:
    (said,) = Training().go(inside=lambda loss: None)
    assert "no parameter got a gradient in 20 steps" in said and "loss.backward()" in said


def test_gradients_that_are_all_zero_are_told() -> None:
    (said,) = Training().go(inside=lambda loss: (loss * 0.0).backward())
    assert "all gradients are zero, in 20 steps from step 0 on" in said


def test_a_frozen_model_is_not_told() -> None:
    training = Training()
    training.model.requires_grad_(False)
    assert not training.go(inside=lambda loss: None, after=lambda step: None)


def test_a_scaler_that_leaves_out_steps_is_not_told() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1000)
    training = Training(extras={"scaler": scaler})

    def after(step: int) -> None:
        scaler.step(training.optimizer)
        scaler.update()

    assert not training.go(inside=lambda loss: scaler.scale(loss).backward(), after=after)


def test_a_second_optimizer_whose_state_does_not_travel_is_told() -> None:
    training = Training()
    other = torch.optim.SGD(training.model[1].parameters(), lr=0.1, momentum=0.9)

    def both(step: int) -> None:
        training.optimizer.step()
        other.step()

    (said,) = training.go(after=both)
    assert "an optimizer that join was not given" in said and "by name" in said


def test_several_optimizers_each_called_once_are_fine() -> None:
    training = Training.__new__(Training)
    training.model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    first, second = (torch.optim.SGD(part.parameters(), lr=0.1, momentum=0.9) for part in training.model)
    data = TensorDataset(torch.randn(256, 4), torch.randint(0, 2, (256,)))
    training.run = holdfast.join(training.model, {"g": first, "d": second}, data, batch_size=8, shards=4)

    def both(step: int) -> None:
        second.step()
        if step % 3 == 2:
            first.step()

    assert not training.go(after=both)


def test_any_optimizer_of_the_model_is_refused_in_the_inner_loop() -> None:
    training = Training()
    other = torch.optim.Adam(training.model[1].parameters())
    with pytest.raises(holdfast.ConfigError, match="another optimizer, of a Adam on parameters of the model"):
        training.go(inside=lambda loss: (loss.backward(), other.step()))
    training.run.close()


def test_an_optimizer_of_something_else_is_nobodys_business() -> None:
    training = Training()
    elsewhere = nn.Linear(2, 2)
    other = torch.optim.SGD(elsewhere.parameters(), lr=0.1)

    def inside(loss: torch.Tensor) -> None:
        loss.backward()
        elsewhere(torch.ones(2)).sum().backward()
        other.step()

    assert not training.go(inside=inside)


def test_hooks_go_with_the_run() -> None:
    training = Training()
    training.go()
    training.optimizer.step()  # after the run is over, nobody counts
