"""A training of a fixed number of shards a step, for Horovod's API: its weights do not depend on the number of ranks.

    HOLDFAST_SHARDS=6 holdfast run --workers 3 --horovod tests/horovod/sharded_training.py OUTPUT BATCHES PAUSE_S

Each rank computes its shards, `hvd.shards()`, a backward pass for each. Writes a line of each batch as
elastic_training.py does, and at the end the digest of the weights and of the optimizer's state.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch

from holdfast.state.digest import digest_tensors

OUTPUT, BATCHES, PAUSE_S = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])

hvd.init()
torch.manual_seed(0)
layers = [torch.nn.Linear(8, 256), torch.nn.Tanh(), torch.nn.Linear(256, 600), torch.nn.Tanh(), torch.nn.Linear(600, 1)]
model = torch.nn.Sequential(*layers)
unused = torch.nn.Parameter(torch.zeros(3))  # has a gradient in some shards only
model.register_parameter("unused", unused)
optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0)
resets: list[int] = []
state.register_reset_callbacks([lambda: resets.append(hvd.size())])


def loss_of(batch: int, shard: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(batch * 1000 + shard)
    found = model(torch.rand(4, 8, generator=generator)).square().mean()
    return found + unused.sum() * 0.1 if shard % 4 == 1 else found


@hvd.elastic.run
def train(state: Any) -> None:
    with (OUTPUT / f"{os.getpid()}.log").open("a", buffering=1) as log:
        while state.batch < BATCHES:
            optimizer.zero_grad()
            for shard in hvd.shards():
                loss_of(state.batch, shard).backward()
            optimizer.step()
            state.batch += 1
            time.sleep(PAUSE_S)
            state.commit()
            weight = float(model[0].weight.detach().double().sum())
            log.write(f"{state.batch} {hvd.rank()} {hvd.size()} {time.monotonic()} {weight!r} {len(resets)}\n")


train(state)
found = dict(model.state_dict())
for number, values in optimizer.state_dict()["state"].items():
    found[f"momentum {number}"] = values["momentum_buffer"]
print("digest", digest_tensors(found.items()), flush=True)
