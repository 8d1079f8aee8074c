"""The training of benchmarks/modes.py: the demo's model (examples/digits.py), with a worker that may be slower.

Each worker writes a line for each step that it computed: when, and its loss. One says how good
the model is at the end. A shard takes `--shard-s` more, in which the processor is free: it stands for the work of an
accelerator.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import holdfast

LEARNING_RATE = 3e-3


def mode_of(words: str, compress: str) -> holdfast.Exact | holdfast.Elastic | holdfast.Async:
    """`exact`, `elastic`, or `async` and its bound on staleness."""
    kind, _, bound = words.partition(" ")
    if kind == "async":
        return holdfast.Async(staleness=None if bound == "none" else int(bound), compress=compress or None)
    return holdfast.Exact() if kind == "exact" else holdfast.Elastic()


def demo_model() -> nn.Module:
    return nn.Sequential(
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", required=True)
    parser.add_argument("--compress", default="")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--notes", type=Path, required=True)
    parser.add_argument("--shard-s", type=float, default=0.02)
    parser.add_argument("--slow", type=float, default=1.0, help="how many times slower the last worker is")
    options = parser.parse_args()
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16
    y = torch.tensor(labels)
    test = torch.arange(len(y)) % 5 == 0
    torch.manual_seed(0)
    model = demo_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / options.steps))
    )
    run = holdfast.join(
        model,
        optimizer,
        TensorDataset(x[~test], y[~test]),
        batch_size=64,
        drop_last=True,
        shards=8,
        extras={"scheduler": schedule},
        mode=mode_of(options.mode, options.compress),
    )
    more_s = options.shard_s * (options.slow if run.id.startswith("w3.") else 1.0)
    with (options.notes / f"{run.id}.jsonl").open("w") as notes:
        for step in run.steps(options.steps):
            computed = False
            for images_, labels_ in step:
                loss = F.cross_entropy(model(images_), labels_)
                loss.backward()
                step.record(loss=loss)
                time.sleep(more_s)
                computed = True
            nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            optimizer.step()
            schedule.step()
            if computed:
                notes.write(json.dumps({"t": time.time(), "loss": step.metrics["loss"]}) + "\n")
    if run.leader:
        model.eval()
        with torch.no_grad():
            right = (model(x[test]).argmax(1) == y[test]).float().mean().item()
        (options.notes / "accuracy").write_text(str(right))


if __name__ == "__main__":
    main()
