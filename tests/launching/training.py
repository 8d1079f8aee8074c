"""A small training as a function: of a module, and, run as a script, of the script that launches it.

    python training.py HOME OUT [options as JSON]

`hold` is a path: the training waits before steps 5 and 12 until there is the file of that name with the step's number.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import holdfast

STEPS, HELD = 24, (5, 12)
DATA = torch.utils.data.TensorDataset(torch.randn(256, 8, generator=torch.Generator().manual_seed(3)))


def train(
    steps: int = STEPS, *, lr: float = 0.1, weights: torch.Tensor | None = None, hold: str = "", checkpoint: str = ""
) -> Any:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    if weights is not None:
        model.weight.data.copy_(weights)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    saving = holdfast.Checkpoints(checkpoint, every=2) if checkpoint else None
    run = holdfast.join(model, optimizer, DATA, batch_size=32, shards=8, checkpoint=saving)
    for step in run.steps(steps):
        if hold and step.number in HELD:
            Path(f"{hold}{step.number}.{run.id}").write_text(str(os.getpid()))
            while not Path(f"{hold}{step.number}").exists():
                time.sleep(0.02)
        for (x,) in step:
            loss = F.mse_loss(model(x)[:, 0], x.sum(1))
            loss.backward()
            step.record(loss=loss)
        optimizer.step()
    return {"digest": run.digest(), "weight": model.weight.detach(), "leader": run.leader, "worker": run.id}


def fail_at_once() -> None:
    raise ZeroDivisionError("nothing to divide by")


if __name__ == "__main__":
    home, out = sys.argv[1:3]
    options = json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}
    done = holdfast.launch(
        train, workers=3, dir=home, run="r", dashboard=None, kwargs={"weights": torch.ones(1, 8), **options}
    )
    Path(out).write_text(json.dumps([done.value["digest"], done.digest, done.outcome, done.value["leader"]]))
