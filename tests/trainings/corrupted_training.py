"""A training like that of the exactness soak, in which one worker's memory flips one bit, once.

The flip is done here, in the script, through the tensors that a script can reach; nothing of Holdfast knows of it. The
order is in a file, so that all workers run the same command, and only the worker that it names obeys: the one that
comes in its place has another name and is honest. Without the file nobody flips anything.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import holdfast
from holdfast.testing.bit_flips import flip
from tests.trainings.exactness_training import Net, Noisy


class Flip:
    """What this worker is to do wrong, if anything; what it did is written into the order's file."""

    def __init__(self, worker: str, order: Path) -> None:
        self._order = order
        self._asked: dict[str, Any] = json.loads(order.read_text()) if order.exists() else {}
        self._obeys = self._asked.get("worker") == worker

    def happens(self, kind: str, step: int, tensors: list[torch.Tensor]) -> None:
        asked = self._asked
        if self._obeys and kind == asked["kind"] and step == asked["step"] and tensors:
            self._obeys = False
            done = flip(tensors, kind, random.Random(asked["seed"]), asked["bit"])
            self._order.write_text(json.dumps({**asked, "done": done}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--order", type=Path, required=True, help="who is to flip what, and what was flipped")
    args = parser.parse_args()

    torch.manual_seed(11)
    model = Net(64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=args.steps + 1)
    run = holdfast.join(model, optimizer, Noisy(), batch_size=32, shards=8, seed=3, extras={"scheduler": scheduler})
    bad = Flip(run.id, args.order)
    for step in run.steps(args.steps):
        bad.happens("parameter", step.number, list(model.parameters()))
        for x, y in step:
            loss = F.cross_entropy(model(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            step.record(loss=loss)
            bad.happens("gradient", step.number, [p.grad for p in model.parameters() if p.grad is not None])
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        run.optimizer.step()
        state: list[dict[str, Any]] = list(optimizer.state.values())
        bad.happens("optimizer", step.number, [one["momentum_buffer"] for one in state])
        scheduler.step()


if __name__ == "__main__":
    main()
