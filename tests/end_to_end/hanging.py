"""A training in which chosen workers hang at a chosen step, each in its own way, or all evaluate for a while."""

from __future__ import annotations

import argparse
import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

import holdfast

WORKER = os.environ.get("HOLDFAST_WORKER", "")
lock = threading.Lock()
stuck = False  # from now on, in this process
mark = Path("nowhere")  # if there is such a file, in its loader process


def take_a_lock_twice() -> None:
    with lock, lock:
        pass


class Samples(torch.utils.data.Dataset[Any]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self._x = torch.randn(256, 8, generator=generator)
        self._y = torch.randint(0, 4, (256,), generator=generator)

    def __len__(self) -> int:
        return len(self._x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        while stuck or (torch.utils.data.get_worker_info() is not None and mark.exists()):
            time.sleep(3600)
        return self._x[index], self._y[index]


def evaluate(seconds: float, place: Path) -> None:
    """For so long at least, and until there is a file `go`."""
    place.joinpath(f"evaluates-{WORKER}").touch()
    time.sleep(seconds)
    while not place.joinpath("go").exists():
        time.sleep(0.05)


def main() -> None:
    global stuck, mark
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--at", type=int, default=-1)
    parser.add_argument("--deadlock", default="-")
    parser.add_argument("--stuck", default="-")
    parser.add_argument("--stuck-loader", default="-")
    parser.add_argument("--evaluate", type=float, default=0.0)
    parser.add_argument("--place", type=Path, default=Path())
    parser.add_argument("--pause", type=float, default=0.0)
    args = parser.parse_args()
    mark = args.place / f"stuck-{WORKER}"
    loaders = int(args.stuck_loader == WORKER)
    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = holdfast.join(model, optimizer, Samples(), batch_size=32, shards=16, seed=3, num_workers=loaders)
    for step in run.steps(args.steps):
        stuck = step.number >= args.at >= 0 and args.stuck == WORKER
        if step.number == args.at and loaders:
            mark.touch()
        for x, y in step:
            if step.number >= args.at >= 0 and args.deadlock == WORKER:
                take_a_lock_twice()
            F.cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
            time.sleep(args.pause)
        run.optimizer.step()
        if step.number == args.at and args.evaluate:
            evaluate(args.evaluate, args.place)
    print("digest", run.digest())


if __name__ == "__main__":
    main()
