"""An image classifier with augmentation, an uneven training set, validation and early stopping.

    python examples/images.py                                          # alone
    holdfast run --workers 4 --keep-best val_accuracy:max --run images examples/images.py
    holdfast checkpoint export images --best val_accuracy:max --only parameters --to best.safetensors

scikit-learn's digits, of which all but the 0, 1 and 2 are made rare, as data of one's own so often is. Weighted
sampling shows the rare ones as often as the others, each time a little shifted, turned and noisy. Training ends when
five epochs have brought nothing new. Needs `pip install holdfast[demo]`.
"""

import argparse
import math
import sys
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset, WeightedRandomSampler

import holdfast

try:
    from sklearn.datasets import load_digits
except ImportError:
    print("images.py needs scikit-learn for its images: pip install 'holdfast[demo]'", file=sys.stderr)
    sys.exit(2)

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=60, help="at most")
parser.add_argument("--patience", type=int, default=5, metavar="EPOCHS", help="without a better validation")
parser.add_argument("--batch-size", type=int, default=64, help="samples in a step, over all workers")
parser.add_argument("--shards", type=int, default=8, help="parts of a batch; at least as many as workers")
parser.add_argument("--rare", type=int, default=8, help="every so many-th image of a rare digit is kept")
parser.add_argument("--lr", type=float, default=2e-3)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--slow", type=float, default=0.0, metavar="S", help="extra seconds of sleep per shard")
args = parser.parse_args()


class Augmented(Dataset):
    """Each image a little different every time. Holdfast seeds the generators, so a repeated shard is the same."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        angle = (torch.rand(()).item() - 0.5) * math.pi / 9
        shift = (torch.rand(2) - 0.5) * 0.4
        turn = torch.tensor([[math.cos(angle), -math.sin(angle), 0.0], [math.sin(angle), math.cos(angle), 0.0]])
        turn[:, 2] = shift
        grid = F.affine_grid(turn[None], [1, 1, 8, 8], align_corners=False)
        image = F.grid_sample(self.images[index][None], grid, align_corners=False)[0]
        return image + 0.05 * torch.randn_like(image), self.labels[index]


# The data: 8 x 8 pixels from 0 to 16. Every fifth image is kept for validation; of the rest most digits become rare.
pixels, digits = load_digits(return_X_y=True)
x = torch.tensor(pixels, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
y = torch.tensor(digits)
number = torch.arange(len(x))
kept = number % 5 == 0
shown = ~kept & ((y < 3) | (number % args.rare == 1))
training, validation = Augmented(x[shown], y[shown]), TensorDataset(x[kept], y[kept])
often = torch.bincount(training.labels, minlength=10)
sampler = WeightedRandomSampler((1.0 / often)[training.labels].tolist(), num_samples=1024)

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
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.97)

run = holdfast.join(
    model,
    optimizer,
    training,
    sampler=sampler,
    batch_size=args.batch_size,
    shards=args.shards,
    seed=args.seed,
    extras={"scheduler": scheduler},
)


def validate(batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    images, labels = batch
    scores = model(images)
    return {"loss": F.cross_entropy(scores, labels), "accuracy": (scores.argmax(dim=1) == labels).float().mean()}


for step in run.epochs(args.epochs):
    for images, labels in step:
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        step.record(loss=loss)
        time.sleep(args.slow)
    optimizer.step()
    if step.ends_epoch:
        scheduler.step()
        found = run.evaluate(validation, validate, batch_size=60, prefix="val_")
        if run.leader:
            print(
                f"epoch {step.epoch + 1}: loss {step.metrics['loss']:.3f}, "
                f"validation {found['val_loss']:.3f}, {found['val_accuracy']:.1%} right",
                flush=True,
            )
        best = run.best("val_accuracy:max")
        if best.since >= args.patience:
            run.stop(f"nothing better than {best.value:.1%} in {best.since} epochs")

if run.leader:
    best = run.best("val_accuracy:max")
    print(f"best after {best.step} steps: {best.value:.1%} of {len(validation)} images right")
