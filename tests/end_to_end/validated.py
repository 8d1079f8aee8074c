"""A training with validation, early stopping and two loops, as a script. Writes down what every worker came to see.

TEST_KILLS names places ("in 7", "after 11"): whoever is the leader when it comes there kills itself, once. "in N": in
the middle of the evaluation after step N; "after N": when it has recorded the result. "all stopped": every first worker
of its slot does, after the training was stopped. TEST_HOLD: a file; nobody begins step 1 before it is there.
TEST_WORKERS: while there are fewer, steps take long, so that others come.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import holdfast

HOME = Path(sys.argv[1])
KILLS = set(filter(None, os.environ.get("TEST_KILLS", "").split(",")))
HOLD = os.environ.get("TEST_HOLD", "")
WORKERS = int(os.environ.get("TEST_WORKERS", "0"))


def dataset(samples: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 6, generator=generator)
    return TensorDataset(x, (x.sum(1) > 0).long() + torch.randint(0, 2, (samples,), generator=generator))


def die(place: str) -> None:
    if place not in KILLS or not run.leader:
        return
    try:
        (HOME / place.replace(" ", "-")).touch(exist_ok=False)
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)


def hold(step: int) -> None:
    while HOLD and step == 1 and not Path(HOLD).exists():
        time.sleep(0.02)
    if len(run.workers) < WORKERS:
        time.sleep(0.2)


def tell(place: str, **found: object) -> None:
    with (HOME / f"seen-{run.id}.jsonl").open("a") as file:
        file.write(json.dumps({"at": place, **found}) + "\n")


torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 24), nn.BatchNorm1d(24), nn.Dropout(0.2), nn.ReLU(), nn.Linear(24, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
run = holdfast.join(model, optimizer, dataset(96, 1), batch_size=16, shards=4)
validation = dataset(45, 2)
chunks = 0


def measure(batch: list[torch.Tensor]) -> dict[str, object]:
    global chunks
    chunks += 1
    if chunks == 2:
        die(f"in {run.step}")
    x, y = batch
    x = x + 0.01 * torch.randn_like(x) + random.random() * 0.01 + float(np.random.rand()) * 0.01
    out = model(x)
    right = (out.argmax(1) == y).sum()
    return {"loss": F.cross_entropy(out, y), "accuracy": (right, len(y))}


def validate(place: str) -> None:
    global chunks
    chunks = 0
    model[2].train(False)  # a part that the script keeps in eval mode stays there, and nothing else does
    before = torch.get_rng_state()
    result = run.evaluate(validation, measure, prefix="val_", batch_size=4)
    assert [module.training for module in model] == [True, True, False, True, True]
    assert torch.equal(before, torch.get_rng_state()), "the generators are where they were"
    model.train()
    tell(place, **result, best=run.best("val_loss:min"), newest=dict(run.metrics))
    die(f"after {run.step}")


def train(steps: int) -> None:
    for step in run.steps(steps):
        hold(step.number)
        for x, y in step:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            step.record(loss=loss)
        optimizer.step()
        if step.number % 4 == 3:
            validate(str(step.number))
            if run.best("val_loss:min").since >= 4:
                run.stop(f"val_loss has not improved since step {run.best('val_loss:min').step}")


train(8)
validate("between")
for group in optimizer.param_groups:
    group["lr"] *= 0.5
train(400)
if "all stopped" in KILLS and run.id.endswith(".1"):
    os.kill(os.getpid(), signal.SIGKILL)
tell("end", stopped=run.stopped, step=run.step, digest=run.digest())
