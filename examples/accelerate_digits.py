"""Handwritten digits in a loop on Hugging Face's Accelerate, trained with Holdfast.

    python examples/accelerate_digits.py                              # alone
    holdfast run --workers 3 examples/accelerate_digits.py            # three workers: the same weights

Needs `pip install 'holdfast[huggingface,demo]'`. Reaches 95 % and more on the images that it was not shown.
"""

import argparse

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from holdfast.integrations.huggingface import Accelerator  # the one line that is not Accelerate's

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--batch-size", type=int, default=8, help="samples in a shard")
parser.add_argument("--accumulate", type=int, default=8, help="shards in a step; at least as many as workers")
args = parser.parse_args()

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
y = torch.tensor(labels)
held_out = torch.arange(len(x)) % 5 == 0
model = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(576, 10))
optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
shown = DataLoader(TensorDataset(x[~held_out], y[~held_out]), batch_size=args.batch_size, shuffle=True)

accelerator = Accelerator(gradient_accumulation_steps=args.accumulate, cpu=True)
model, optimizer, shown, scheduler = accelerator.prepare(model, optimizer, shown, scheduler)
for epoch in range(args.epochs):
    model.train()
    for images, labels in shown:
        with accelerator.accumulate(model):
            accelerator.backward(F.cross_entropy(model(images), labels))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        accuracy = (model(x[held_out]).argmax(1) == y[held_out]).float().mean()
    accelerator.print(f"epoch {epoch}: accuracy {accuracy:.3f} on images that it was not shown")
accelerator.print(f"weights {accelerator.run.digest()}")
