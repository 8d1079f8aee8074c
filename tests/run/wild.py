"""What models and scripts do in the wild, and what made them differ between workers once. In the form of cases.py."""

from __future__ import annotations

import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from cases import Batch, Case, Training, backward, mlp, sgd
from torch import nn
from torch.nn import functional as F


def noise_before(training: Training, step: int) -> None:
    """Between `for step in …` and the inner loop."""
    training.optimizer.param_groups[0]["lr"] = 0.05 + 0.05 * torch.rand(()).item()


def settings_midway(training: Training, step: int) -> None:
    """As a run goes on: statistics are frozen, dropout is lowered, the momentum of statistics changes."""
    if step == 2:
        training.model[1].eval()
        training.model[1].momentum = 0.5
    if step == 3:
        training.model[2].p = 0.1


class Memory:
    """An extra that goes by the order in which its dicts were filled, and by what kinds they are."""

    def __init__(self) -> None:
        self.seen: dict[str, float] = {}
        self.named: OrderedDict[str, float] = OrderedDict()
        self.counts: defaultdict[str, float] = defaultdict(float)

    def add(self, step: int, value: float) -> float:
        name = f"{(7 * step + 3) % 10}"
        self.seen[name] = value
        self.named[name] = value
        self.named.move_to_end(name, last=step % 2 == 0)
        self.counts[f"kind {step % 3}"] += value
        total = 0.0
        for one in [*self.seen.values(), *self.named.values(), *self.counts.values()]:
            total = 0.7 * total + one
        return total

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen, "named": self.named, "counts": self.counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen, self.named, self.counts = state["seen"], state["named"], state["counts"]


def remembering() -> Training:
    training = sgd(mlp())
    training.extras["memory"] = Memory()
    return training


def apply_by_memory(training: Training, step: int) -> None:
    size = sum(float(p.grad.abs().sum()) for p in training.model.parameters())
    training.optimizer.param_groups[0]["lr"] = 0.01 * (1 + training.extras["memory"].add(step, size))
    training.optimizer.step()


class Kinds(nn.Module):
    """Buffers whose sum over shards does not fit into their own type, and types that cannot be added at all."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.register_buffer("nanoseconds", torch.tensor(1_790_000_000_000_000_000))
        self.register_buffer("sixteen", torch.tensor([20000.0], dtype=torch.float16))
        self.register_buffer("eight", torch.zeros(4, dtype=torch.float8_e4m3fn))
        self.register_buffer("short", torch.zeros(3, dtype=torch.uint16))
        self.register_buffer("large", torch.tensor([2**63 + 5], dtype=torch.uint64))
        self.register_buffer("turned", torch.ones(2, dtype=torch.complex64).mul(1 + 2j).conj())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.nanoseconds.add_(1)
        self.sixteen.add_(16)
        self.eight = (self.eight.float() + x.detach().mean()).to(torch.float8_e4m3fn)
        self.short = (self.short.int() + len(x)).to(torch.uint16)
        self.large = (self.large.view(torch.int64) + 1).view(torch.uint64)
        self.turned.mul_(1.5)
        return self.linear(x) * (1 + self.sixteen.float() / 1e5)


def restrided() -> Training:
    """A hook gives gradients other strides, and the norm after it goes by them."""
    training = sgd(nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 4)))

    def turn(parameter: torch.Tensor) -> None:
        if parameter.ndim == 2:
            parameter.grad = parameter.grad.t().contiguous().t()

    for parameter in training.model.parameters():
        parameter.register_post_accumulate_grad_hook(turn)
    return training


def clip(training: Training, step: int) -> None:
    nn.utils.clip_grad_norm_(training.model.parameters(), 0.01)
    training.optimizer.step()


@contextmanager
def autocast_outside() -> Iterator[None]:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        yield


def cast_backward(training: Training, batch: Batch, step: int) -> torch.Tensor:
    x, y = batch
    loss = F.cross_entropy(training.model(x).float(), y)
    loss.backward()
    return loss


def part_of_it() -> Training:
    model = mlp()
    model[0].requires_grad_(False)
    return Training(model, torch.optim.AdamW(model[2].parameters(), lr=1e-2))


def add_group(training: Training, step: int) -> None:
    training.optimizer.step()
    if step == 1:
        training.model[0].requires_grad_(True)
        training.optimizer.add_param_group({"params": list(training.model[0].parameters()), "lr": 1e-3})


def settled() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 4))


def scripted() -> nn.Module:
    """Compiled by torch.jit, whose modules keep their buffers in no dict."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch would rather have torch.compile
        return torch.jit.script(mlp(nn.BatchNorm1d(8)))


WILD: dict[str, Case] = {
    "a scripted model": Case(lambda: sgd(scripted())),
    "noise before the shards": Case(lambda: sgd(mlp()), before=noise_before),
    "settings of modules midway": Case(lambda: sgd(settled()), before=settings_midway),
    "extras with an order": Case(remembering, apply=apply_by_memory),
    "buffers that overflow": Case(lambda: sgd(Kinds()), shard=backward),
    "a hook that changes strides": Case(restrided, apply=clip),
    "autocast around both loops": Case(lambda: sgd(mlp()), shard=cast_backward, around=autocast_outside),
    "a group that is added midway": Case(part_of_it, apply=add_group),
}
