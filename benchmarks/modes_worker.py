"""The training of benchmarks/modes.py: handwritten digits, with a worker that may be slower than the rest.

Each worker writes a line for each step that it computed: when, and its loss. One says how good the model is at the end.
A shard takes `--shard-s`, in which the processor is free: it stands for the work of an accelerator.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import holdfast

MODES = {
    "exact": lambda: holdfast.Exact(),
    "elastic": lambda: holdfast.Elastic(),
    "async 0": lambda: holdfast.Async(staleness=0),
    "async 4": lambda: holdfast.Async(staleness=4),
    "async none": lambda: holdfast.Async(staleness=None),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", choices=list(MODES), required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--notes", type=Path, required=True)
    parser.add_argument("--shard-s", type=float, default=0.004)
    parser.add_argument("--slow", type=float, default=1.0, help="how many times slower the last worker is")
    options = parser.parse_args()
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32) / 16
    y = torch.tensor(labels)
    test = torch.arange(len(y)) % 5 == 0
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    data = TensorDataset(x[~test], y[~test])
    run = holdfast.join(model, optimizer, data, batch_size=64, shards=8, mode=MODES[options.mode]())
    shard_s = options.shard_s * (options.slow if run.id.startswith("w3.") else 1.0)
    with (options.notes / f"{run.id}.jsonl").open("w") as notes:
        for step in run.steps(options.steps):
            computed = False
            for images_, labels_ in step:
                loss = F.cross_entropy(model(images_), labels_)
                loss.backward()
                step.record(loss=loss)
                time.sleep(shard_s)
                computed = True
            optimizer.step()
            if computed:
                notes.write(json.dumps({"t": time.time(), "loss": step.metrics["loss"]}) + "\n")
    if run.leader:
        right = (model(x[test]).argmax(1) == y[test]).float().mean().item()
        (options.notes / "accuracy").write_text(str(right))


if __name__ == "__main__":
    main()
