"""A small training with one mistake in it, named by its first argument."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import holdfast


class Best:
    """What many scripts keep beside the model."""

    def __init__(self) -> None:
        self.loss = 9.0

    def state_dict(self) -> dict[str, Any]:
        return {"loss": self.loss}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loss = state["loss"]


def main(mistake: str, steps: int) -> None:
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(512, 8), torch.randint(0, 4, (512,)))
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    other = torch.optim.SGD(model[2].parameters(), lr=1e-3)
    own = torch.Generator().manual_seed(1)
    best = Best()
    run = holdfast.join(model, optimizer, data, batch_size=30, shards=6, seed=3, extras={"best": best})
    for step in run.steps(steps):
        for x, y in step:
            noise = torch.randn(x.shape, generator=own) if mistake == "own generator" else 0.0
            loss = F.cross_entropy(model(x + noise), y)
            loss.backward()
            step.record(loss=loss, seconds=time.perf_counter())
            if mistake == "second optimizer":
                other.step()
        if run.leader or mistake != "leader steps":
            optimizer.step()
        if mistake == "leader's extra" and run.leader:
            best.loss = step.metrics["loss"]
        if mistake == "leader's weight" and run.leader and step.number == 3:
            with torch.no_grad():
                model[0].weight[0, 0] += 1.0
        if mistake == "leader's last weight" and run.leader and step.number == steps - 1:
            with torch.no_grad():
                model[0].weight[0, 0] += 1.0
        if mistake == "leader raises" and run.leader and step.number > 2:
            raise FileNotFoundError("no such directory: plots")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
