"""A plain training, from which every shape of the zoo is made: a shape replaces the lines under some of the marks.

Run it alone, or with `SLEEP=0.05 holdfast run --workers 3`. With ZOO_GATE, a file with a number, it waits in the first
shard of the step of that number until the file says more, so that faults can be placed.
"""

import faulthandler
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import holdfast

# -- imports

STEPS = 40
GATE = os.environ.get("ZOO_GATE", "")
WORKER = os.environ.get("HOLDFAST_WORKER", "")
faulthandler.register(signal.SIGUSR1, all_threads=True)  # the runner asks for stacks if the run hangs
torch.manual_seed(0)
random.seed(0)
np.random.seed(0)


def pause(step, shard):
    """Before the user's lines for a shard: `shard` counts those of this worker, in this step."""
    time.sleep(float(os.environ.get("SLEEP", "0")))
    if GATE and shard == 0:
        Path(f"{GATE}-at-{WORKER}").write_text(str(step))
        while step >= int(Path(GATE).read_text()):
            time.sleep(0.01)


samples = torch.Generator().manual_seed(1)
x = torch.randn(96, 10, generator=samples)
y = torch.randint(0, 3, (96,), generator=samples)
extras = {}
# -- data
dataset = torch.utils.data.TensorDataset(x, y)
# -- options
options = {"batch_size": 24, "shards": 6}
# -- model
model = nn.Sequential(nn.Linear(10, 16), nn.ReLU(), nn.Linear(16, 3))
# -- optimizer
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
# -- extras

# -- join
run = holdfast.join(model, optimizer, dataset, extras=extras, checkpoint="none", **options)
# -- first

for step in run.steps(STEPS):
    # -- before

    for number, batch in enumerate(step):
        pause(step.number, number)
        # -- shard
        x, y = batch
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        step.record(loss=loss)
    # -- apply
    optimizer.step()
# -- after

print("DIGEST", run.digest(), flush=True)
