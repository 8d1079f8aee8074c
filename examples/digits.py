"""Handwritten digits: a small convolutional net on scikit-learn's 1,797 images, trained with Holdfast.

    python examples/digits.py                                 # alone
    holdfast run --workers 4 examples/digits.py               # four workers: the same weights, bit for bit
    holdfast run --workers 4 examples/digits.py --slow 0.05   # slow enough to kill a few workers meanwhile

Needs `pip install holdfast[demo]`. Reaches 98 % and more on the images that it was not shown.
"""

import argparse
import math
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import holdfast

try:
    from sklearn.datasets import load_digits
except ImportError:
    print("digits.py needs scikit-learn for its images: pip install 'holdfast[demo]'", file=sys.stderr)
    sys.exit(2)

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--steps", type=int, help="stop after so many steps, whatever --epochs says")
parser.add_argument("--batch-size", type=int, default=64, help="samples in a step, over all workers")
parser.add_argument("--shards", type=int, default=8, help="parts of a batch; at least as many as workers")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--lr", type=float, default=3e-3)
parser.add_argument("--slow", type=float, default=0.0, metavar="S", help="extra seconds of sleep per shard")
args = parser.parse_args()

# The data: 8 x 8 pixels from 0 to 16. Every fifth image is kept for the test.
images, labels = load_digits(return_X_y=True)
x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
y = torch.tensor(labels)
test = torch.arange(len(x)) % 5 == 0
dataset = TensorDataset(x[~test], y[~test])
steps = args.steps or args.epochs * (len(dataset) // args.batch_size)

# The model, the optimizer and the schedule, as in any PyTorch script.
torch.manual_seed(args.seed)
model = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.Conv2d(32, 64, 3, padding=1),
    nn.BatchNorm2d(64),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Dropout(0.25),
    nn.Linear(64 * 4 * 4, 10),
)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 0.5 * (1 + math.cos(math.pi * s / steps)))

run = holdfast.join(
    model,
    optimizer,
    dataset,
    batch_size=args.batch_size,
    drop_last=True,
    shards=args.shards,
    seed=args.seed,
    extras={"scheduler": scheduler},
)
for step in run.steps(steps):
    for x_shard, y_shard in step:
        loss = F.cross_entropy(model(x_shard), y_shard)
        loss.backward()
        step.record(loss=loss)
        time.sleep(args.slow)
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    scheduler.step()

if run.leader:
    model.eval()
    with torch.no_grad():
        right = (model(x[test]).argmax(dim=1) == y[test]).float().mean().item()
    print(f"after {steps} steps: {right:.1%} of {int(test.sum())} test images right")
