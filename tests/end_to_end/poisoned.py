"""A training in which one sample is not finite, or far too large: `python poisoned.py --non-finite skip`.

Without shuffling, so that the step that has the sample is known. With --without, nothing is poisoned and the script
itself leaves out those steps: what the others must come to, by other means than theirs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import holdfast
from tests.harness.gate import wait_at

BATCH, SHARDS, STEPS = 16, 8, 30


class Samples(torch.utils.data.Dataset[Any]):
    def __init__(self, steps: list[int], value: float) -> None:
        generator = torch.Generator().manual_seed(5)
        self._x = torch.randn(BATCH * STEPS, 12, generator=generator)
        self._y = self._x.sum(1, keepdim=True).tanh()
        for step in steps:
            self._x[step * BATCH + 5] = self._y[step * BATCH + 5] = value

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._x[index] + 0.05 * torch.randn(12), self._y[index]


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--non-finite", default="stop")
    parser.add_argument("--spike", type=float, default=0.0)
    parser.add_argument("--poisoned", type=int, nargs="*", default=[20])
    parser.add_argument("--value", type=float, default=float("inf"))
    parser.add_argument("--without", type=int, nargs="*", default=[])
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--record", action="store_true", help="the loss; else only the gradients tell")
    parser.add_argument("--gate", type=Path)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> str:
    args = parse(arguments)
    torch.manual_seed(11)
    # Batch norm's statistics are spoilt by a forward alone; weight decay and momentum move weights without a gradient.
    width = args.width
    model = nn.Sequential(nn.Linear(12, width), nn.BatchNorm1d(width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 7, 0.8)
    run = holdfast.join(
        model,
        optimizer,
        Samples([] if args.without else args.poisoned, args.value),
        batch_size=BATCH,
        shards=SHARDS,
        shuffle=False,
        extras={"scheduler": scheduler},
        non_finite=args.non_finite,
        spike=args.spike,
    )
    for step in run.steps(STEPS):
        wait_at(args.gate, run.id, step.number)
        for x, y in step:
            if step.number in args.without:
                continue
            loss = F.mse_loss(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            if args.record:
                step.record(loss=loss)
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        scheduler.step()
        if step.skipped:
            assert all(parameter.grad is None for parameter in model.parameters())
            print("skipped", step.number, step.metrics.get("loss"), flush=True)
    digest = run.digest()
    run.close()
    return digest


if __name__ == "__main__":
    print("digest", main(sys.argv[1:]))
