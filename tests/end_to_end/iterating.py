"""A training on an iterable, with a position or without. Each sample has a number, which --seen writes down."""

from __future__ import annotations

import argparse
import json
import random
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import IterableDataset

import holdfast
from tests.harness.gate import wait_at

SAMPLES = 102
KINDS = ("stateful", "plain", "loader", "huggingface")


class Plain(IterableDataset[Any]):
    """In an order that is drawn from the process's generator."""

    def __iter__(self) -> Iterator[Any]:
        for number in random.sample(range(SAMPLES), SAMPLES):
            yield self.sample(number)

    def sample(self, number: int) -> Any:
        return number, torch.tensor([(number * 7 + at) % 251 for at in range(8)]) / 251 + random.random() / 1000


class Stateful(Plain):
    """The same with a position, which it finds without reading."""

    def __init__(self) -> None:
        self.at, self.epoch = 0, 0

    def __iter__(self) -> Iterator[Any]:
        order = random.Random(self.epoch).sample(range(SAMPLES), SAMPLES)
        while self.at < SAMPLES:
            self.at += 1
            yield self.sample(order[self.at - 1])
        self.at, self.epoch = 0, self.epoch + 1

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.epoch = state["at"], state["epoch"]


def rows() -> Iterator[dict[str, Any]]:
    for number in range(SAMPLES):
        yield {"number": number, "x": [(number * 7 + at) % 251 / 251 for at in range(8)]}


def from_rows(samples: list[dict[str, Any]]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor([one["number"] for one in samples]), torch.tensor([one["x"] for one in samples])


def opened(kind: str) -> Any:
    if kind == "plain":
        return Plain()
    if kind == "stateful":
        return Stateful()
    if kind == "huggingface":
        import datasets

        return datasets.IterableDataset.from_generator(rows).shuffle(seed=3, buffer_size=16)
    from torchdata.stateful_dataloader import StatefulDataLoader

    with warnings.catch_warnings():  # torchdata 0.11 asks torch for what is deprecated since
        warnings.simplefilter("ignore")
        return StatefulDataLoader(Stateful(), batch_size=12)


def main(words: list[str] | None = None) -> str:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=KINDS, default="stateful")
    parser.add_argument("--gate", type=Path)
    parser.add_argument("--seen", type=Path)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of sleep per shard")
    args = parser.parse_args(words)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 16))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    batch_size = None if args.kind == "loader" else 12
    collate = from_rows if args.kind == "huggingface" else None
    run = holdfast.join(
        model, optimizer, opened(args.kind), batch_size=batch_size, shards=6, seed=5, collate_fn=collate
    )
    seen: list[tuple[int, list[int]]] = []
    for step in run.epochs(args.epochs):
        wait_at(args.gate, run.id, step.number)
        for number, x in step:
            seen.append((step.epoch, number.tolist()))
            loss = F.cross_entropy(model(x), number % 16)
            loss.backward()
            step.record(loss=loss)
            time.sleep(args.pause)
        optimizer.step()
    if args.seen is not None:
        args.seen.write_text(json.dumps(seen))
    run.close()
    return run.digest()


if __name__ == "__main__":
    main()
