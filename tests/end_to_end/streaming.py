"""A training on a stream of token files, or of tar files. Each sample has a number, which --seen writes down."""

from __future__ import annotations

import argparse
import io
import json
import tarfile
import time
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn import functional as F

import holdfast
from holdfast.data import Stream, Tokens
from tests.harness.gate import wait_at

SIZES = (23, 8, 41, 30)  # samples of each file
SAMPLES = sum(SIZES)
LENGTH = 8


def write(kind: str, directory: Path) -> None:
    """Files in which sample n can be told to be number n."""
    directory.mkdir()
    first = 0
    for place, size in enumerate(SIZES):
        numbers = range(first, first + size)
        first += size
        if kind == "tokens":
            tokens = [[number, *((number * 7 + at) % 251 for at in range(1, LENGTH))] for number in numbers]
            numpy.array(tokens, dtype=numpy.uint16).tofile(directory / f"{place}.bin")
            continue
        with tarfile.open(directory / f"{place}.tar", "w") as tar:
            for number in numbers:
                for part, data in (
                    ("x", bytes((number * 7 + at) % 251 for at in range(LENGTH))),
                    ("cls", b"%d" % number),
                ):
                    about = tarfile.TarInfo(f"{number:05}.{part}")
                    about.size = len(data)
                    tar.addfile(about, io.BytesIO(data))


def from_tar(sample: dict[str, Any]) -> torch.Tensor:
    return torch.tensor([int(sample["cls"]), *sample["x"][1:]])


def main(words: list[str] | None = None) -> str:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path)
    parser.add_argument("--gate", type=Path)
    parser.add_argument("--seen", type=Path)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of sleep per shard")
    args = parser.parse_args(words)
    if any(args.data.glob("*.tar")):
        stream = Stream(args.data / "*.tar", decode=from_tar, shuffle_buffer=24, block=4)
    else:
        files = sorted(args.data.glob("*.bin"))
        stream = Stream([Tokens(path, length=LENGTH) for path in files], shuffle_buffer=24, block=4)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(256, 8), nn.Flatten(), nn.Dropout(0.1), nn.Linear(8 * LENGTH, 16))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    run = holdfast.join(model, optimizer, stream, batch_size=12, shards=6, seed=5, num_workers=1)
    seen: list[tuple[int, list[int]]] = []
    for step in run.epochs(args.epochs):
        wait_at(args.gate, run.id, step.number)
        for batch in step:
            seen.append((step.epoch, batch[:, 0].tolist()))
            loss = F.cross_entropy(model(batch % 256), batch[:, 0] % 16)
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
