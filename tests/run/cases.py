"""Models and loops as people write them. Each case runs under Holdfast and in a plain PyTorch loop, line for line."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

Batch = tuple[torch.Tensor, torch.Tensor]


def dataset(samples: int = 96) -> TensorDataset:
    generator = torch.Generator().manual_seed(7)
    return TensorDataset(
        torch.randn(samples, 6, generator=generator), torch.randint(0, 4, (samples,), generator=generator)
    )


@dataclass
class Training:
    """What a script has before its loop."""

    model: nn.Module
    optimizer: Any  # one, or several by name
    extras: dict[str, Any] = field(default_factory=dict)


def backward(training: Training, batch: Batch, step: int) -> torch.Tensor:
    x, y = batch
    loss = F.cross_entropy(training.model(x), y)
    loss.backward()
    return loss


def apply(training: Training, step: int) -> None:
    training.optimizer.step()


def nothing(training: Training, step: int) -> None:
    pass


@dataclass(frozen=True)
class Case:
    build: Callable[[], Training]
    shard: Callable[[Training, Batch, int], torch.Tensor] = backward
    apply: Callable[[Training, int], None] = apply
    before: Callable[[Training, int], None] = nothing  # before the loop over the step's shards
    steps: int = 6
    around: Callable[[], AbstractContextManager[None]] = nullcontext  # around both loops

    def start(self) -> Training:
        torch.manual_seed(5)
        return self.build()


def sgd(model: nn.Module, **options: Any) -> Training:
    return Training(model, torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options}))


def mlp(*middle: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), *middle, nn.ReLU(), nn.Linear(8, 4))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(6, 4)
        self.there = nn.Linear(4, 4)
        self.back = nn.Linear(4, 4)
        self.back.weight = self.there.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.back(torch.tanh(self.there(self.into(x))))


class PartlyUsed(nn.Module):
    """`never` has no gradient at all; `rare` has one in those shards whose first number is positive."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.never = nn.Parameter(torch.ones(4))
        self.rare = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(x)
        return h * self.rare if x[0, 0] > 0 else h


class Counting(nn.Module):
    """Buffers of every kind, written in place: small integers that would overflow in a sum, flags, a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.register_buffer("count", torch.zeros((), dtype=torch.int32))
        self.register_buffer("small", torch.full((3,), 200, dtype=torch.uint8))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.bool))
        self.register_buffer("untouched", torch.arange(5))
        self.register_buffer("mean", torch.zeros(4), persistent=False)
        self.register_buffer("coarse", torch.zeros(4, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(x)
        self.count += 1
        self.small += 3
        self.seen[int(x[0, 0] > 0)] = True
        self.mean.mul_(0.9).add_(h.detach().mean(0))
        self.coarse.add_(h.detach().mean(0))
        return h - self.mean


class Assigning(nn.Module):
    """Buffers that the forward replaces rather than writes, as in `self.mean = 0.9 * self.mean + ...`."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.inner = nn.Module()
        self.inner.register_buffer("mean", torch.zeros(4))
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.body(x)
        self.inner.mean = 0.9 * self.inner.mean + 0.1 * h.detach().mean(0)
        self.steps = self.steps + 1
        return h - self.inner.mean


class Signs(nn.Module):
    """A zero whose sign matters, and a NaN that stays: neither comparison nor mean may mistake them."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.register_buffer("zero", torch.zeros(1))
        self.register_buffer("gap", torch.tensor([float("nan"), 0.1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.zero.neg_()
        return self.body(x) * torch.copysign(torch.ones(1), self.zero)


class GrowingCache(nn.Module):
    """A cache that the forward makes as large as it needs, beside batch norm; and an expanded buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(nn.BatchNorm1d(8))
        self.register_buffer("cache", torch.zeros(0), persistent=False)
        self.register_buffer("wide", torch.ones(1).expand(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.cache) < 4:
            self.cache = torch.linspace(0, 1, 4)
        return self.body(x) + self.cache * self.wide


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(6, 4, dtype=torch.complex64))
        self.scale = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex64) @ self.turn).abs() * self.scale


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        images = x.repeat(1, 8).view(-1, 3, 4, 4).contiguous(memory_format=torch.channels_last)
        return self.norm(self.conv(images)).mean((2, 3))


def two_groups() -> Training:
    model = mlp(nn.LayerNorm(8))
    groups = [{"params": model[0].parameters(), "lr": 1e-2}, {"params": [*model[1].parameters()], "weight_decay": 0.0}]
    return Training(model, torch.optim.AdamW([*groups, {"params": model[3].parameters()}], lr=3e-3, weight_decay=0.1))


def scheduled() -> Training:
    training = sgd(mlp())
    optimizer = training.optimizer
    lr = torch.optim.lr_scheduler
    warm = lr.LinearLR(optimizer, 0.1, total_iters=3)
    cool = lr.CosineAnnealingLR(optimizer, 4)
    training.extras["scheduler"] = lr.SequentialLR(optimizer, [warm, cool], milestones=[3])
    return training


def apply_and_schedule(training: Training, step: int) -> None:
    training.optimizer.step()
    training.extras["scheduler"].step()


def clip_and_apply(training: Training, step: int) -> None:
    nn.utils.clip_grad_norm_(training.model.parameters(), 0.05)
    training.optimizer.step()
    training.optimizer.zero_grad(set_to_none=bool(step % 2))  # as people do; it must not matter


def frozen() -> Training:
    model = mlp()
    model[0].requires_grad_(False)
    return Training(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1))


def freeze_and_thaw(training: Training, step: int) -> None:
    training.model[0].requires_grad_(step < 2 or step >= 4)
    training.model[2].bias.requires_grad_(step != 3)


def penalty(training: Training, batch: Batch, step: int) -> torch.Tensor:
    x, y = batch
    loss = F.cross_entropy(training.model(x), y)
    weight = training.model[0].weight
    (slope,) = torch.autograd.grad(loss, weight, create_graph=True)
    loss = loss + 0.1 * slope.square().sum()
    loss.backward(create_graph=bool(step % 2))
    return loss


def twice(training: Training, batch: Batch, step: int) -> torch.Tensor:
    x, y = batch
    logits = training.model(x)
    loss = F.cross_entropy(logits, y)
    loss.backward(retain_graph=True)
    (0.01 * logits.square().mean()).backward()
    return loss


def autocast(training: Training, batch: Batch, step: int) -> torch.Tensor:
    x, y = batch
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(training.model(x).float(), y)
    loss.backward()
    return loss


def half(training: Training, batch: Batch, step: int) -> torch.Tensor:
    x, y = batch
    loss = F.cross_entropy(training.model(x.bfloat16()), y)
    loss.backward()
    return loss


def averaged() -> Training:
    training = sgd(mlp(nn.BatchNorm1d(8)))
    multi = torch.optim.swa_utils.get_ema_multi_avg_fn(0.8)
    training.extras["average"] = torch.optim.swa_utils.AveragedModel(training.model, multi_avg_fn=multi)
    return training


def apply_and_average(training: Training, step: int) -> None:
    training.optimizer.step()
    training.extras["average"].update_parameters(training.model)


def scaled() -> Training:
    training = sgd(mlp())
    training.extras["scaler"] = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    return training


def scaled_backward(training: Training, batch: Batch, step: int) -> torch.Tensor:
    x, y = batch
    loss = F.cross_entropy(training.model(x), y)
    infinite = step == 2 and bool(x[0, 0] > 0)  # some shards overflow at one step: the scaler skips it
    training.extras["scaler"].scale(loss * (float("inf") if infinite else 1.0)).backward()
    return loss


def scaled_apply(training: Training, step: int) -> None:
    scaler = training.extras["scaler"]
    scaler.unscale_(training.optimizer)
    nn.utils.clip_grad_norm_(training.model.parameters(), 1.0)
    scaler.step(training.optimizer)
    scaler.update()


def sometimes(training: Training, step: int) -> None:
    if step % 3:
        training.optimizer.step()


def regularized(training: Training, step: int) -> None:
    """A term that does not depend on the data, added once after the shards: the same on every worker."""
    (1e-2 * sum(p.abs().sum() for p in training.model.parameters())).backward()
    training.optimizer.step()


def noisy(training: Training, step: int) -> None:
    """Noise after the shards is drawn from a seed of the step: the same on every worker."""
    for parameter in training.model.parameters():
        parameter.grad.add_(0.01 * torch.randn_like(parameter))
    training.optimizer.step()


def gan() -> Training:
    """A generator and a discriminator, each with an optimizer of another kind, and schedules for both."""
    model = nn.ModuleDict(
        {"g": mlp(nn.BatchNorm1d(8)), "d": nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))}
    )
    optimizers = {
        "g": torch.optim.Adam(model["g"].parameters(), lr=1e-2),
        "d": torch.optim.SGD(model["d"].parameters(), lr=0.1, momentum=0.9),
    }
    schedules = {f"schedule of {n}": torch.optim.lr_scheduler.StepLR(o, 2) for n, o in optimizers.items()}
    return Training(model, optimizers, schedules)


def judged(training: Training, batch: Batch, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses of discriminator and generator."""
    g, d = training.model["g"], training.model["d"]
    made = g(torch.randn_like(batch[0]))
    judge = F.softplus(-d(batch[0][:, :4])).mean() + F.softplus(d(made.detach())).mean()
    return judge, F.softplus(-d(made)).mean()


def both_backward(training: Training, batch: Batch, step: int) -> torch.Tensor:
    judge, made = judged(training, batch, step)
    judge.backward()
    made.backward(inputs=list(training.model["g"].parameters()))
    return judge + made


def both_apply(training: Training, step: int) -> None:
    for name, optimizer in training.optimizer.items():
        optimizer.step()
        training.extras[f"schedule of {name}"].step()


def one_backward(training: Training, batch: Batch, step: int) -> torch.Tensor:
    judge, made = judged(training, batch, step)
    loss = made if step % 2 else judge
    loss.backward(inputs=list(training.model["g" if step % 2 else "d"].parameters()))
    return loss


def one_apply(training: Training, step: int) -> None:
    name = "g" if step % 2 else "d"
    training.optimizer[name].step()
    training.extras[f"schedule of {name}"].step()


CASES: dict[str, Case] = {
    "two optimizers": Case(gan, shard=both_backward, apply=both_apply),
    "two optimizers in turn": Case(gan, shard=one_backward, apply=one_apply, steps=7),
    "mlp": Case(lambda: sgd(mlp(), weight_decay=0.01)),
    "batch norm": Case(lambda: sgd(mlp(nn.BatchNorm1d(8)))),
    "batch norm, cumulative": Case(lambda: sgd(mlp(nn.BatchNorm1d(8, momentum=None)))),
    "dropout": Case(lambda: sgd(mlp(nn.Dropout(0.5)))),
    "spectral norm": Case(lambda: sgd(nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4))))),
    "frozen": Case(frozen),
    "frozen and thawed midway": Case(lambda: sgd(mlp(), weight_decay=0.1), before=freeze_and_thaw),
    "tied": Case(lambda: sgd(Tied())),
    "partly used": Case(lambda: sgd(PartlyUsed(), weight_decay=0.1)),
    "groups": Case(two_groups),
    "scheduler": Case(scheduled, apply=apply_and_schedule, steps=8),
    "clipping": Case(lambda: sgd(mlp()), apply=clip_and_apply),
    "bfloat16": Case(lambda: sgd(mlp(nn.LayerNorm(8)).bfloat16()), shard=half),
    "autocast": Case(lambda: sgd(mlp()), shard=autocast),
    "double backward": Case(lambda: sgd(mlp()), shard=penalty),
    "two backward calls": Case(lambda: sgd(mlp()), shard=twice),
    "averaged model": Case(averaged, apply=apply_and_average),
    "gradient scaler": Case(scaled, shard=scaled_backward, apply=scaled_apply),
    "step now and then": Case(lambda: sgd(mlp()), apply=sometimes),
    "regularized": Case(lambda: sgd(mlp()), apply=regularized),
    "gradient noise": Case(lambda: sgd(mlp()), apply=noisy),
    "complex and float64": Case(lambda: sgd(Complex(), lr=0.01)),
    "channels last": Case(lambda: sgd(Images().to(memory_format=torch.channels_last))),
    "buffers of all kinds": Case(lambda: sgd(Counting())),
    "assigned buffers": Case(lambda: sgd(Assigning())),
    "signs and gaps": Case(lambda: sgd(Signs())),
    "growing cache": Case(lambda: sgd(GrowingCache())),
}
