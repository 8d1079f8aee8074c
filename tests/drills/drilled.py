"""What the tests drill: a small training. With --clock its loss looks at the time of day from that step on; with
--forgets a factor changes that no joiner is given."""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import holdfast

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--clock", type=int, default=10**9)
parser.add_argument("--forgets", action="store_true")
parser.add_argument("--pause", type=float, default=0.03, help="seconds of sleep per shard")
args = parser.parse_args()

generator = torch.Generator().manual_seed(1)
dataset = TensorDataset(torch.randn(64, 8, generator=generator), torch.randint(0, 3, (64,), generator=generator))
torch.manual_seed(2)
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3))
run = holdfast.join(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), dataset, batch_size=16, shards=4)
factor = 1.0
for step in run.steps(args.steps):
    for x, y in step:
        loss = F.cross_entropy(model(x), y)
        if step.number >= args.clock:
            loss = loss * (1.0 + time.time() % 1.0)
        (loss * factor).backward()
        step.record(loss=loss)
        time.sleep(args.pause)
    run.optimizer.step()
    if args.forgets:
        factor *= 0.9
