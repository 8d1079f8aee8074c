"""Handwritten digits with PyTorch and Horovod's API: elastic training that goes on when workers are lost or come.

    holdfast run --workers 2 --horovod examples/horovod_torch.py
    holdfast run --workers 2 --horovod examples/horovod_torch.py --pause 0.05         # slow enough to kill a worker
    HOLDFAST_SHARDS=8 holdfast run --workers 3 --horovod examples/horovod_torch.py    # one digest for any number

But for `hvd.shards()` it is written for Horovod, and says nothing of Holdfast. Needs `pip install 'holdfast[demo]'`.
"""

import argparse
import hashlib
import time

import horovod.torch as hvd
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--batches", type=int, default=300)
parser.add_argument("--samples", type=int, default=16, help="of each shard, which is a rank without HOLDFAST_SHARDS")
parser.add_argument("--pause", type=float, default=0.0, help="seconds of waiting in each step")
options = parser.parse_args()

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(1)
images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16.0, torch.tensor(labels)
shown, held_back = slice(0, 1500), slice(1500, None)

layers = [
    nn.Conv2d(1, 16, 3),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(144, 64),
    nn.ReLU(),
]
model = nn.Sequential(*layers, nn.Linear(64, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
state = hvd.elastic.TorchState(model=model, optimizer=optimizer, batch=0)


def samples_of(batch, shard):
    """They follow from the batch and the shard alone, so that anybody can compute them."""
    chosen = torch.randint(1500, [options.samples], generator=torch.Generator().manual_seed(1000 * batch + shard))
    return images[shown][chosen], labels[shown][chosen]


@hvd.elastic.run
def train(state):
    while state.batch < options.batches:
        optimizer.zero_grad()
        for shard in hvd.shards():  # one, but for HOLDFAST_SHARDS
            inputs, targets = samples_of(state.batch, shard)
            F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        time.sleep(options.pause)
        state.batch += 1
        state.commit()


train(state)
if hvd.rank() == 0:
    with torch.no_grad():
        right = (model(images[held_back]).argmax(1) == labels[held_back]).float().mean().item()
    print(f"{right:.1%} of the {len(labels[held_back])} digits that it was not shown, with {hvd.size()} workers")
    digest = hashlib.sha256(b"".join(one.detach().numpy().tobytes() for one in model.parameters()))
    print(f"digest {digest.hexdigest()[:32]}")
