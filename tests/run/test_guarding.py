"""What becomes of steps that are not finite, or whose loss is far from the usual: in a run of one."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

import holdfast
from holdfast.core.config import CHANGEABLE, RunConfig
from holdfast.core.errors import ConfigError, DivergedError
from holdfast.core.words import encode_json
from holdfast.modes.capture import GradientCapture
from holdfast.modes.diverging import IN_A_ROW_MAX, JUDGED_FROM, REMEMBERED, Losses, not_finite

Join = Callable[..., holdfast.Run]
HUGE = 3e38


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.last = nn.Linear(6, 1)
        self.register_buffer("mask", torch.full((3,), -math.inf))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(F.gelu(self.norm(self.first(x))))
        return found


class Trained:
    """One run of one. `spoil(step)` is what the loss is multiplied with."""

    def __init__(self, joined: Join, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        data = torch.randn(400, 4)
        self.run = joined(self.model, self.optimizer, data, batch_size=4, shards=2, **options)
        self.skipped: list[int] = []

    def train(
        self,
        steps: int,
        spoil: Callable[[int], float] = lambda step: 1.0,
        loss_of: Callable[[int], float] | None = None,
        penalty: float = 0.0,
    ) -> None:
        for step in self.run.steps(steps):
            for number, x in enumerate(step):
                loss = self.model(x).square().mean()
                (loss * (spoil(step.number) if number else 1.0)).backward()
                if loss_of is not None:
                    step.record(loss=loss_of(step.number))
            if penalty:
                for p in self.model.parameters():  # its gradient, by hand: also where the step has brought none
                    p.grad = penalty * p.detach().sign() + (0 if p.grad is None else p.grad)
            self.optimizer.step()
            if step.skipped:
                self.skipped.append(step.number)

    def state(self) -> dict[str, torch.Tensor]:
        found = {name: value.clone() for name, value in self.model.state_dict().items()}
        for index, state in self.optimizer.state_dict()["state"].items():
            found[f"momentum {index}"] = state["momentum_buffer"].clone()
        return found


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_gradient_that_is_not_finite_stops_the_training_and_is_named(joined: Join, value: float) -> None:
    trained = Trained(joined)
    with pytest.raises(DivergedError, match=r"the gradient of 'first.weight' is not finite at step 3") as caught:
        trained.train(6, spoil=lambda step: value if step == 3 else 1.0)
    assert "non_finite='skip'" in caught.value.hint
    Trained(joined, non_finite="ignore").train(6, spoil=lambda step: value if step == 3 else 1.0)


def test_the_first_that_is_not_finite_is_named_whatever_is_frozen(joined: Join) -> None:
    trained = Trained(joined)
    trained.model.first.requires_grad_(False)
    trained.model.norm.weight.requires_grad_(False)
    with pytest.raises(DivergedError, match=r"the gradient of 'norm\.bias' is not finite at step 0"):
        trained.train(1, spoil=lambda step: math.inf)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64])
def test_finite_values_are_finite_however_large_their_sum_is(dtype: torch.dtype) -> None:
    """And one that is not is found among them, at either end, beside buffers of the same dtype that never are."""

    class Kept:
        metrics: dict[str, float] = {}  # noqa: RUF012
        present = frozenset({0, 1})

    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.zeros(7, dtype=dtype)), nn.Parameter(torch.zeros(3, 5, dtype=dtype))
            self.register_buffer("never", torch.full((4,), math.inf, dtype=dtype))

    capture = GradientCapture(Holds())
    kept: Any = Kept()
    kept.layout = capture.layout()
    kept.memory = torch.zeros(kept.layout.slot_bytes, dtype=torch.uint8)
    views = kept.layout.views(kept.memory)
    views[2].fill_(math.inf)
    large = torch.finfo(dtype).max
    for view in views[:2]:
        view.fill_(large)
    assert capture.first_non_finite(kept) == ""
    for index, name in enumerate("ab"):
        for at in (0, -1):
            for value in (math.nan, -math.inf):
                view = views[index].view(-1)
                view[at] = value
                assert capture.first_non_finite(kept) == f"the gradient of {name!r}"
                view[at] = large
    views[0][3], views[1][1, 1] = math.inf, -math.inf
    assert capture.first_non_finite(kept) == "the gradient of 'a'"


@pytest.mark.parametrize("penalty", [0.0, 0.01], ids=["", "with a penalty on weights"])
def test_a_skipped_step_changes_neither_weights_nor_momentum_nor_statistics(joined: Join, penalty: float) -> None:
    trained = Trained(joined, non_finite="skip")
    trained.train(3, penalty=penalty)
    before = trained.state()
    trained.train(5, spoil=lambda step: math.nan, penalty=penalty)
    assert trained.skipped == [3, 4]
    assert trained.run.step == 5
    after = trained.state()
    assert all(torch.equal(before[name], after[name]) for name in before)
    trained.train(6, penalty=penalty)
    assert trained.skipped == [3, 4]
    assert not torch.equal(after["first.weight"], trained.state()["first.weight"])


def test_a_bounded_number_of_steps_in_a_row_is_skipped(joined: Join) -> None:
    trained = Trained(joined, non_finite="skip")
    trained.train(IN_A_ROW_MAX, spoil=lambda step: math.nan)
    trained.train(IN_A_ROW_MAX + 1)  # one that is well begins the count again
    with pytest.raises(DivergedError, match=f"at step {2 * IN_A_ROW_MAX + 1}, and the {IN_A_ROW_MAX} steps before"):
        trained.train(100, spoil=lambda step: math.nan)
    assert len(trained.skipped) == 2 * IN_A_ROW_MAX


def test_a_gradient_scaler_looks_at_the_gradients_itself(joined: Join) -> None:
    """It needs to see the infinities to lower its scale. The metrics are still looked at."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    trained = Trained(joined, extras={"scaler": scaler})
    trained.train(2, spoil=lambda step: math.inf)
    with pytest.raises(DivergedError, match="the metric 'loss' is nan at step 2"):
        trained.train(3, loss_of=lambda step: math.nan)
    torch.manual_seed(0)
    off = torch.amp.GradScaler("cpu", enabled=False)
    with pytest.raises(DivergedError, match="the gradient of"):
        Trained(joined, extras={"scaler": off}).train(1, spoil=lambda step: math.inf)


def test_a_script_that_was_started_by_hand_cannot_go_back(joined: Join) -> None:
    trained = Trained(joined, non_finite="rewind")
    with pytest.raises(DivergedError, match="is not finite at step 2, and a script that was started by hand") as caught:
        trained.train(3, spoil=lambda step: math.nan if step == 2 else 1.0)
    assert "`holdfast run`" in caught.value.hint


# ---- spikes


def test_a_spike_is_treated_as_a_step_that_is_not_finite(joined: Join) -> None:
    def loss_of(step: int) -> float:
        return 50.0 if step in (3, 12, 13) else 1.0 + step / 10

    with pytest.raises(DivergedError, match=r"the loss is 50, 30.3 times the median of the last 12 steps at step 12"):
        Trained(joined, spike=5.0).train(20, loss_of=loss_of)
    trained = Trained(joined, spike=5, non_finite="skip")
    trained.train(20, loss_of=loss_of)
    assert trained.skipped == [12, 13]  # too little was known at step 3
    trained = Trained(joined, non_finite="skip")
    trained.train(20, loss_of=loss_of)
    assert trained.skipped == []


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"spike": 0.5}, "spike is 0.5"),
        ({"spike": 1.0}, "spike is 1.0"),
        ({"spike": -3}, "spike is -3"),
        ({"spike": math.nan}, "spike is nan"),
        ({"spike": math.inf}, "spike is inf"),
        ({"spike": "much"}, "spike is 'much'"),
        ({"spike": 5.0, "non_finite": "ignore"}, "spike says what to look for"),
    ],
)
def test_what_spikes_cannot_be_is_said(joined: Join, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Trained(joined, **options)


def test_spikes_need_a_recorded_loss(joined: Join) -> None:
    with pytest.raises(ConfigError, match=r"join\(spike=3\) looks at the metric 'loss', and no shard has recorded it"):
        Trained(joined, spike=3.0).train(1)


losses = st.lists(st.tuples(st.floats(-10, 1e6), st.booleans()), max_size=3 * REMEMBERED)


@given(losses, losses, st.floats(1.5, 20.0))
def test_who_is_given_the_state_judges_like_who_has_seen_it_all(
    before: list[tuple[float, bool]], after: list[tuple[float, bool]], spike: float
) -> None:
    old, new = Losses(spike), Losses(spike)
    new.applied({"loss": 3.0}, skipped=False)  # what it knew before is forgotten
    for loss, skipped in before:
        old.applied({"loss": loss}, skipped=skipped)
    new.load(old.state())
    for loss, skipped in after:
        assert old.spike({"loss": loss}) == new.spike({"loss": loss})
        assert old.in_a_row == new.in_a_row
        for one in (old, new):
            one.applied({"loss": loss}, skipped=skipped)
    assert old.state() == new.state()
    assert len(old.state().get("losses", ())) <= REMEMBERED


@given(st.lists(st.floats(0.1, 100.0), min_size=JUDGED_FROM, max_size=2 * REMEMBERED), st.floats(1.5, 20.0))
def test_a_loss_within_what_was_seen_lately_times_the_factor_is_no_spike(seen: list[float], factor: float) -> None:
    known = Losses(factor)
    for loss in seen:
        assert known.spike({"loss": loss}) == "" or loss > factor * min(seen)
        known.applied({"loss": loss}, skipped=False)
    lately = seen[-REMEMBERED:]
    assert known.spike({"loss": factor * min(lately)}) == ""
    assert known.spike({"loss": factor * max(lately) * 1.01}) != ""
    assert known.spike({}) == "" and known.spike({"other": 1e9}) == ""


def test_metrics_are_named_in_their_order() -> None:
    assert not_finite({"a": 1.0, "b": math.inf, "c": math.nan}) == "the metric 'b' is inf"
    assert not_finite({"a": 1.0}) == not_finite({}) == ""


# ---- settings


def test_what_to_do_may_change_between_two_starts_and_nothing_else() -> None:
    one = RunConfig(batch_size=8, shards=2, length=80, parameters=3)
    other = RunConfig(batch_size=8, shards=2, length=80, parameters=3, non_finite="skip", spike=4.0)
    assert one.check_same(one.encode(), may_differ=CHANGEABLE)
    assert not other.check_same(one.encode(), may_differ=CHANGEABLE)
    with pytest.raises(ConfigError, match="non_finite='skip', but the run has non_finite='stop'"):
        other.check_same(one.encode())
    with pytest.raises(ConfigError, match="batch_size=16"):
        RunConfig(batch_size=16, shards=2, length=80, parameters=3).check_same(one.encode(), may_differ=CHANGEABLE)
    older = encode_json({"batch": 8, "last": "drop", "shards": 2, "length": 80, "parameters": 3})
    with pytest.raises(ConfigError, match="do not say its batch_size: another version of Holdfast began it"):
        one.check_same(older)
