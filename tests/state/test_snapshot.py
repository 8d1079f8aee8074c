"""Snapshots: a joiner that restores one is level, bit for bit, and stays level; and what does not fit is named."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from holdfast.core.errors import ConfigError, ProtocolError
from holdfast.state.digest import weights_digest
from holdfast.state.layout import spec_of
from holdfast.state.snapshot import Holder, Snapshot
from holdfast.state.wire import TransferManifest


class Model(nn.Module):
    """As people write them: batch norm, tied, frozen, unused, bfloat16, hidden buffers, extra state."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 6, 3, dtype=dtype)
        self.norm = nn.BatchNorm2d(6)
        self.first = nn.Linear(6, 6, dtype=dtype)
        self.tied = nn.Linear(6, 6, dtype=dtype)
        self.tied.weight = self.first.weight
        self.frozen = nn.Linear(6, 6, dtype=dtype).requires_grad_(False)
        self.unused = nn.Parameter(torch.ones((), dtype=dtype))
        self.register_buffer("hidden", torch.zeros(3), persistent=False)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.hidden += 1
        dtype = self.first.weight.dtype
        x = self.norm(self.convolution(x.to(dtype)).float()).mean((2, 3)).to(dtype)
        return self.frozen(self.tied(self.first(x))).float()

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


def adam(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    weights = [p for name, p in model.named_parameters() if "weight" in name]
    others = [p for name, p in model.named_parameters() if "weight" not in name]
    groups = [{"params": weights, "weight_decay": 0.1, "betas": (0.8, 0.99)}, {"params": others, "lr": 0.03}]
    return torch.optim.AdamW(groups, **{"lr": 0.01, **options})


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adam": adam,
    "adam with tensor lr": lambda m: adam(m, lr=torch.tensor(0.01)),
    "adam, amsgrad, no foreach": lambda m: adam(m, amsgrad=True, foreach=False),
    "sgd": sgd,
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters()),
    "rprop": lambda m: torch.optim.Rprop(m.parameters()),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters()),
    "plain": lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
}


class Worker:
    """A worker's loop, without the others."""

    def __init__(self, seed: int, make: Callable[[nn.Module], torch.optim.Optimizer], **options: Any) -> None:
        torch.manual_seed(seed)
        self.model = Model(**options)
        self.optimizer = make(self.model)
        self.scheduler = lr_scheduler.MultiStepLR(self.optimizer, [2, 2, 4], gamma=0.5)
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        extras = {"scheduler": self.scheduler, "average": self.average, "scaler": self.scaler}
        self.holder = Holder(self.model, self.optimizer, extras)

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        loss = self.model(torch.randn(4, 2, 5, 5, generator=generator)).square().mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.average.update_parameters(self.model)
        if number == 2:
            self.model.frozen.weight.requires_grad_(True)

    def run(self, start: int, stop: int) -> None:
        for number in range(start, stop):
            self.step(number)


def moved(snapshot: Snapshot) -> Snapshot:
    """As it arrives: other memory, the tree through its bytes."""
    manifest = TransferManifest.decode(TransferManifest.of(snapshot).encode(), bytes_max=snapshot.nbytes)
    twins = copy.deepcopy(snapshot.tensors)
    return Snapshot(manifest.summary.step, manifest.tree, twins)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_joiner_is_level_and_stays_level(name: str, dtype: torch.dtype) -> None:
    member = Worker(1, OPTIMIZERS[name], dtype=dtype)
    member.run(0, 4)
    for joiner in (Worker(2, OPTIMIZERS[name], dtype=dtype), Worker(3, OPTIMIZERS[name], dtype=dtype)):
        if joiner.model.frozen.weight[0, 0].item() > 0:
            joiner.run(0, 1)  # one has a past of its own
        identities = [id(tensor) for tensor in (*joiner.model.parameters(), *joiner.model.buffers())]
        snapshot = member.holder.capture(4)
        joiner.holder.restore(moved(snapshot))
        assert joiner.holder.capture(4).digest() == snapshot.digest()
        assert identities == [id(tensor) for tensor in (*joiner.model.parameters(), *joiner.model.buffers())]
        assert joiner.model.tied.weight is joiner.model.first.weight
        assert joiner.model.frozen.weight.requires_grad and not joiner.model.frozen.bias.requires_grad
    member.run(4, 7)
    joiner.run(4, 7)
    assert joiner.holder.capture(7).digest() == member.holder.capture(7).digest()
    assert weights_digest(joiner.model) == weights_digest(member.model)


def test_moments_of_another_dtype_than_the_parameters_keep_their_bits() -> None:
    member, joiner = (Worker(seed, adam, dtype=torch.bfloat16) for seed in (1, 2))
    member.run(0, 2)
    for state in member.optimizer.state.values():
        state["exp_avg"] = state["exp_avg"].float() + 1e-5  # float32 moments, as a master optimizer has
        state["history"] = [state["exp_avg"] * 2, (torch.tensor([7]), "x")]
    snapshot = member.holder.capture(2)
    joiner.holder.restore(moved(snapshot))
    assert joiner.holder.capture(2).digest() == snapshot.digest()
    state = joiner.optimizer.state[joiner.model.first.weight]
    assert state["exp_avg"].dtype == torch.float32 and state["history"][1][0].dtype == torch.int64


def test_channels_last_models() -> None:
    member, joiner, other = (Worker(seed, adam) for seed in (1, 2, 3))
    for worker in (member, joiner):
        worker.model.to(memory_format=torch.channels_last)
    member.run(0, 2)
    snapshot = member.holder.capture(2)
    joiner.holder.restore(moved(snapshot))
    assert joiner.holder.capture(2).digest() == snapshot.digest()
    weight = joiner.model.convolution.weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert joiner.optimizer.state[weight]["exp_avg"].stride() == weight.stride()
    with pytest.raises(ConfigError, match=r"convolution\.weight has another memory format"):
        other.holder.restore(moved(snapshot))


def test_parameters_are_referenced_and_buffers_are_as_of_the_capture() -> None:
    worker = Worker(1, adam)
    worker.run(0, 2)
    snapshot = worker.holder.capture(2)
    addresses = {tensor.data_ptr() for tensor in snapshot.tensors}
    assert {p.data_ptr() for p in worker.model.parameters()} <= addresses
    assert {s["exp_avg"].data_ptr() for s in worker.optimizer.state.values()} <= addresses
    digest = snapshot.digest()
    worker.model(torch.randn(4, 2, 5, 5))  # the next forward pass moves the buffers, here and in the average
    worker.average.module.norm.running_mean += 1
    assert Snapshot(2, snapshot.tree, snapshot.tensors).digest() == digest
    assert worker.holder.capture(2).digest() != digest


@dataclass
class StartOfStep:
    buffers: dict[str, torch.Tensor]

    def base(self) -> dict[str, torch.Tensor]:
        return self.buffers

    def to_restore(self) -> dict[str, torch.Tensor]:
        return self.buffers


def test_buffers_of_the_start_of_the_step_can_be_given() -> None:
    worker = Worker(1, sgd)
    worker.run(0, 1)
    start = StartOfStep({name: buffer.clone() for name, buffer in worker.model.named_buffers()})
    digest = worker.holder.capture(1).digest()
    extras = {"scheduler": worker.scheduler, "average": worker.average, "scaler": worker.scaler}
    with torch.no_grad():
        worker.model(torch.randn(4, 2, 5, 5))
    worker.model.calls -= 1
    holder = Holder(worker.model, worker.optimizer, extras, buffers=start)
    assert holder.capture(1).digest() == digest


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
        lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
        lambda o: lr_scheduler.LambdaLR(o, lambda n: 0.9**n),
        lambda o: lr_scheduler.ReduceLROnPlateau(o),
        lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
        ),
    ],
)
def test_schedulers_travel(make: Callable[[Any], Any]) -> None:
    def build() -> tuple[Holder, Any, Any]:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = make(optimizer)
        return Holder(model, optimizer, {"scheduler": scheduler}), optimizer, scheduler

    def steps(optimizer: Any, scheduler: Any, count: int) -> None:
        for _ in range(count):
            optimizer.step()
            scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))

    (member, *theirs), (joiner, *mine) = build(), build()
    steps(*theirs, 5)
    joiner.restore(moved(member.capture(5)))
    assert joiner.capture(5).digest() == member.capture(5).digest()
    steps(*theirs, 3)
    steps(*mine, 3)
    assert mine[0].param_groups[0]["lr"] == theirs[0].param_groups[0]["lr"]


def test_expanded_buffers() -> None:
    member, joiner = linear(2, 2), linear(2, 2)
    for number, model in enumerate((member, joiner)):
        model.register_buffer("mask", torch.full((1,), float(number)).expand(3))
    mask = joiner.mask
    Holder(joiner, sgd(joiner)).restore(moved(Holder(member, sgd(member)).capture(0)))
    assert joiner.mask is mask and mask.tolist() == [0.0] * 3


def linear(*sizes: int, **options: Any) -> nn.Module:
    return nn.Sequential(*(nn.Linear(a, b, **options) for a, b in itertools.pairwise(sizes)))


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (linear(3, 4), "the run has a parameter 1.bias that this worker does not have"),
        (linear(3, 4, 2, 2), "this worker has a parameter 2.weight that the run does not have"),
        (linear(3, 5, 2), "the parameter 0.weight has shape (4, 3) in the run and (5, 3) here"),
        (linear(3, 4, 2, dtype=torch.float64), "the parameter 0.weight has dtype float32 in the run and float64 here"),
    ],
)
def test_another_model_is_refused_with_the_first_difference(other: nn.Module, sentence: str) -> None:
    snapshot = Holder(model := linear(3, 4, 2), sgd(model)).capture(0)
    before = weights_digest(other)
    with pytest.raises(ConfigError) as caught:
        Holder(other, sgd(other)).restore(snapshot)
    assert caught.value.message == sentence and caught.value.hint
    assert weights_digest(other) == before


def test_another_optimizer_or_other_extras_are_refused() -> None:
    model, twin = linear(3, 4), linear(3, 4)
    snapshot = Holder(model, sgd(model), {"average": AveragedModel(model)}).capture(0)
    with pytest.raises(ConfigError, match="the run has an extra average"):
        Holder(twin, sgd(twin)).restore(snapshot)
    plain = Holder(model, sgd(model)).capture(0)
    with pytest.raises(ConfigError, match="has 1 parameter groups and this worker's has 2"):
        Holder(twin, torch.optim.SGD([{"params": [p]} for p in twin.parameters()], lr=0.1)).restore(plain)
    with pytest.raises(ConfigError, match="parameter group 0 of the run's optimizer has other parameters"):
        Holder(twin, torch.optim.SGD(list(twin.parameters())[::-1], lr=0.1)).restore(plain)
    with pytest.raises(ConfigError, match="without state_dict"):
        Holder(model, sgd(model), {"thing": object()})  # type: ignore[dict-item]
    with pytest.raises(ConfigError, match=r"state\['extras'\]\['odd'\]\['state'\]\['f'\] is a function"):
        Holder(model, sgd(model), {"odd": Odd()}).capture(0)
    with pytest.raises(ProtocolError):
        Holder(model, sgd(model)).restore(Snapshot(0, b"[]", ()))


class Odd:
    def state_dict(self) -> dict[str, Any]:
        return {"f": lambda: 0}

    def load_state_dict(self, state: Any) -> None: ...


class Remembers:
    """An extra with numpy arrays, one of them empty."""

    def __init__(self, number: float) -> None:
        self.seen = numpy.full(5, number)
        self.none = numpy.empty(0, dtype="int16")

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "none": self.none}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seen, self.none = state_dict["seen"], state_dict["none"]


def test_numpy_arrays_in_extras_travel_and_parameters_are_received_where_they_live() -> None:
    def make(number: float) -> tuple[nn.Module, Remembers, Holder]:
        model, extra = nn.Linear(3, 2), Remembers(number)
        return model, extra, Holder(model, torch.optim.SGD(model.parameters(), lr=0.1), {"extra": extra})

    _, _, giver = make(7.0)
    model, extra, taker = make(1.0)
    sent = giver.capture(3)
    places = taker.place(sent.tree, [spec_of(tensor) for tensor in sent.tensors])
    assert {parameter.data_ptr() for parameter in model.parameters()} <= {place.data_ptr() for place in places}
    taker.restore(sent)
    assert extra.seen.tolist() == [7.0] * 5 and extra.none.dtype == "int16"
    assert taker.capture(3).digest() == sent.digest()
