"""What is learned: a small network on scikit-learn's digits, dealt to the clients at random."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.datasets import load_digits

PIXELS, HIDDEN, CLASSES = 64, 32, 10
BATCH = 32
torch.set_num_threads(1)  # the same bits on every machine with the same instructions


def network(seed: int) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(PIXELS, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, CLASSES))


def load() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images and labels to train on, and every fifth to test with."""
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32) / 16.0, torch.tensor(labels)
    test = torch.arange(len(x)) % 5 == 0
    return x[~test], y[~test], x[test], y[test]


def part(number: int, parts: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One client's share."""
    x, y, _, _ = load()
    mine = np.array_split(np.random.default_rng(seed).permutation(len(x)), parts)[number]
    return x[mine], y[mine]


def train(
    model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor, *, steps: int, lr: float, generator: torch.Generator
) -> float:
    """The last batch's loss."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    loss = torch.zeros(())
    for _ in range(steps):
        batch = torch.randint(len(x), (BATCH,), generator=generator)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x[batch]), y[batch])
        loss.backward()
        optimizer.step()
    return float(loss.detach())


@torch.no_grad()
def accuracy(model: torch.nn.Module) -> float:
    _, _, x, y = load()
    return float((model(x).argmax(dim=1) == y).float().mean())
