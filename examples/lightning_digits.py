"""Handwritten digits with Lightning: its own Trainer, trained with Holdfast.

    python examples/lightning_digits.py                              # alone
    holdfast run --workers 3 examples/lightning_digits.py            # three workers: the same weights

Needs `pip install 'holdfast[lightning,demo]'`. Reaches 95 % and more on the images that it was not shown.
"""

import argparse

import lightning
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from holdfast.integrations.lightning import HoldfastStrategy, run_of

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--batch-size", type=int, default=64, help="samples in a step, over all workers")
parser.add_argument("--shards", type=int, default=8, help="parts of a batch; at least as many as workers")
args = parser.parse_args()


class Digits(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3), nn.ReLU(), nn.BatchNorm2d(16), nn.Flatten(), nn.Dropout(0.2), nn.Linear(576, 10)
        )

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.log("accuracy", (self.net(images).argmax(1) == labels).float().mean(), batch_size=len(labels))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), 3e-3)


lightning.seed_everything(0, verbose=False)
images, labels = load_digits(return_X_y=True)
x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
y = torch.tensor(labels)
held_out = torch.arange(len(x)) % 5 == 0
trainer = lightning.Trainer(
    strategy=HoldfastStrategy(shards=args.shards),  # the one line that is not Lightning's
    max_epochs=args.epochs,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,  # holdfast run --checkpoint DIR
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(
    Digits(),
    DataLoader(TensorDataset(x[~held_out], y[~held_out]), batch_size=args.batch_size, shuffle=True),
    DataLoader(TensorDataset(x[held_out], y[held_out]), batch_size=256),
)
if trainer.is_global_zero:
    print(f"accuracy {float(trainer.callback_metrics['accuracy']):.3f} on images that it was not shown")
    print(f"weights {run_of(trainer).digest()}")
