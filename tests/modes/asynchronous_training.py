"""A small training in the asynchronous mode, whose workers write down what they computed.

python asynchronous_training.py --steps 60 --staleness 4 --notes DIR [--shard-s 0.01] [--hurry FILE] [--exact] [--lbfgs]
    [--compress int8]
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import holdfast


class Numbered(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(256, 8, generator=generator)
        self.y = (self.x @ torch.randn(8, 3, generator=generator)).argmax(1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.x[index], self.y[index], index


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--staleness", default="4")
    parser.add_argument("--notes", default="")
    parser.add_argument("--shard-s", type=float, default=0.0)
    parser.add_argument("--hurry", default="", help="shards take no time any more when there is such a file")
    parser.add_argument("--exact", action="store_true")
    parser.add_argument("--lbfgs", action="store_true")
    parser.add_argument("--compress")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    if options.lbfgs:
        optimizer = torch.optim.LBFGS(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 40, gamma=0.5)
    staleness = None if options.staleness == "none" else int(options.staleness)
    mode = holdfast.Exact() if options.exact else holdfast.Async(staleness=staleness, compress=options.compress)
    run = holdfast.join(
        model, optimizer, Numbered(), batch_size=16, shards=2, mode=mode, extras={"scheduler": scheduler}
    )
    notes = (Path(options.notes) / f"{run.id}.jsonl").open("a") if options.notes else None
    for step in run.steps(options.steps):
        indices: list[int] = []
        for x, y, index in step:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            step.record(loss=loss)
            indices += index.tolist()
            time.sleep(0.0 if options.hurry and Path(options.hurry).exists() else options.shard_s)
        optimizer.step()
        scheduler.step()
        if notes is not None and indices:
            notes.write(
                json.dumps({"step": step.number, "indices": indices, "lr": optimizer.param_groups[0]["lr"]}) + "\n"
            )
            notes.flush()
    rate = optimizer.param_groups[0]["lr"]
    print(json.dumps({"who": run.id, "digest": run.digest(), "lr": rate, "step": run.step}), flush=True)


if __name__ == "__main__":
    main()
