"""The training of the exactness soak: small, but with what makes exactness hard.

Batch norm, dropout, random augmentation in Python, NumPy and torch, a parameter that only some shards use, weight
decay with momentum, a schedule, clipping, a frozen layer that thaws midway. With --gate it waits before
the steps at which the gate is shut (tests/harness/gate.py).
With --times each worker writes down when it applied which step, and pauses only until there is a file `hurry`.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import holdfast
from tests.harness import device as simulated
from tests.harness.gate import wait_at


class Noisy(torch.utils.data.Dataset[Any]):
    """Samples that are augmented at random when they are fetched."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self._x = torch.randn(4096, 3, 8, 8, generator=generator)
        self._y = torch.randint(0, 10, (4096,), generator=generator)

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = self._x[index]
        if random.random() < 0.5:
            x = x.flip(-1)
        return x * float(np.random.uniform(0.9, 1.1)) + 0.05 * torch.randn(x.shape), self._y[index]


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.rare = nn.Parameter(torch.ones(8))
        self.hidden = nn.Linear(8 * 64, width)
        self.dropout = nn.Dropout(0.2)
        self.last = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.first(x))
        if x[0, 0, 0, 0] > 0.5:  # some shards use this parameter, some do not
            h = h * self.rare.view(1, -1, 1, 1)
        hidden = F.gelu(self.hidden(F.relu(h).flatten(1)))
        logits: torch.Tensor = self.last(self.dropout(hidden))
        return logits


def device_of(when: str) -> torch.device:
    if when == "cpu":
        return torch.device("cpu")
    device = simulated.load()
    simulated.native().set_early(when == "early")
    return device


def loops_of(steps: int, count: int) -> list[tuple[int, int]]:
    """Where each of so many loops over steps ends, and after which step it is left with `break`; -1: it is not.

    With several, every second one is left early, and an empty one follows the first.
    """
    ends = [steps * number // count for number in range(1, count + 1)]
    loops = [(end, end - 2 if number % 2 and end < steps else -1) for number, end in enumerate(ends)]
    return [*loops[:1], (ends[0] // 2, -1), *loops[1:]] if count > 1 else loops


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--loops", type=int, default=1, help="with lines between them that change the weights")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--loaders", type=int, default=0)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of sleep per shard")
    parser.add_argument(
        "--device", choices=["cpu", "late", "early"], default="cpu", help="the simulated one, and when it runs"
    )
    parser.add_argument("--gate", type=Path)
    parser.add_argument("--times", type=Path, metavar="DIR")
    args = parser.parse_args()

    torch.manual_seed(11)
    device = device_of(args.device)
    model = Net(args.width).to(device)
    model.last.weight.requires_grad_(False)
    others = [parameter for name, parameter in model.named_parameters() if not name.startswith("first")]
    groups: list[dict[str, Any]] = [{"params": list(model.first.parameters()), "lr": 0.02}, {"params": others}]
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.02, 0.05], total_steps=args.steps + 1)
    run = holdfast.join(
        model,
        optimizer,
        Noisy(),
        batch_size=4 * args.shards,
        drop_last=True,
        shards=args.shards,
        seed=3,
        num_workers=args.loaders,
        extras={"scheduler": scheduler},
    )

    def train(until: int, left_after: int) -> None:
        for step in run.steps(until):
            if step.number >= args.steps // 2:
                model.last.weight.requires_grad_(True)
            wait_at(args.gate, run.id, step.number)
            for batch in step:
                x, y = (tensor.to(device, non_blocking=True) for tensor in batch)
                loss = F.cross_entropy(model(x), y)
                loss.backward()  # type: ignore[no-untyped-call]
                step.record(loss=loss)
                if args.pause and not (args.times is not None and args.times.joinpath("hurry").exists()):
                    time.sleep(args.pause)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            run.optimizer.step()
            scheduler.step()
            if args.times is not None:
                with args.times.joinpath(f"{run.id}.times").open("a") as file:
                    file.write(f"{time.time():.6f} {step.number}\n")
            if step.number == left_after:
                break

    loops = loops_of(args.steps, args.loops)
    for number, (until, left_after) in enumerate(loops):
        train(until, left_after)
        if number < len(loops) - 1:
            with torch.no_grad():
                model.first.weight.mul_(0.99)


if __name__ == "__main__":
    main()
