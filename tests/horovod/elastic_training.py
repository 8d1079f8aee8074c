"""A training for Horovod's elastic API, unchanged but for its import: counts samples, commits every batch.

    holdfast run --workers 3 --horovod tests/horovod/elastic_training.py OUTPUT [BATCHES] [PAUSE_S] [SYNC_PAUSE_S]

Writes a line for each batch: its number, the rank, the size, the process, and a digest of the weights.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

OUTPUT, BATCHES = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 100
PAUSE_S = float(sys.argv[3]) if len(sys.argv) > 3 else 0.02
SYNC_PAUSE_S = float(sys.argv[4]) if len(sys.argv) > 4 else 0.0

hvd.init()
torch.manual_seed(hvd.rank())
model = torch.nn.Linear(8, 4)
optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


class Observed(hvd.elastic.TorchState):
    def sync(self) -> None:
        with (OUTPUT / f"{os.getpid()}.sync").open("a") as log:
            log.write(f"{time.monotonic()}\n")
        time.sleep(SYNC_PAUSE_S)
        super().sync()


def fork_a_child() -> None:
    """As loaders of data do: it holds this process's connections open, also when this process has been killed."""
    parent = os.getpid()
    if os.fork() == 0:
        until = time.monotonic() + 600.0
        while time.monotonic() < until:
            time.sleep(0.1)
            if os.getppid() != parent:
                parent, until = os.getppid(), time.monotonic() + 10.0
        os._exit(0)


if os.environ.get("FORKS"):
    fork_a_child()
state = Observed(model=model, optimizer=optimizer, batch=0, samples=0)
resets: list[int] = []
state.register_reset_callbacks([lambda: resets.append(hvd.size())])


@hvd.elastic.run
def train(state: Any) -> None:
    with (OUTPUT / f"{os.getpid()}.log").open("a", buffering=1) as log:
        while state.batch < BATCHES:
            generator = torch.Generator().manual_seed(state.batch * 100 + hvd.rank())
            optimizer.zero_grad()
            model(torch.rand(4, 8, generator=generator)).square().mean().backward()
            optimizer.step()
            state.batch += 1
            state.samples += 4 * hvd.size()
            time.sleep(PAUSE_S)
            state.commit()
            weight = float(model.weight.detach().double().sum())
            log.write(f"{state.batch} {hvd.rank()} {hvd.size()} {time.monotonic()} {weight!r} {len(resets)}\n")


train(state)
print(f"done at {state.batch} with {state.samples} samples", flush=True)
