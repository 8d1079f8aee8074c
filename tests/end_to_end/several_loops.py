"""A training of several loops with lines between them that change the state: a user's script, which prints its digest.

    python several_loops.py --loops 20,60,60,200 --leave 60:50 --evaluate 0.1

has a loop that ends at step 20, one that is left with `break` after step 50, an empty one and a last one.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
from torch.nn import functional as F

import holdfast
from tests.harness.gate import wait_at

WORKER = os.environ.get("HOLDFAST_WORKER", "")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--loops", required=True)
    parser.add_argument("--leave", default="", help="UNTIL:STEP, the loop that is left early and where")
    parser.add_argument("--evaluate", type=float, default=0.0, help="seconds between two loops, on the leader alone")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds of sleep per shard")
    parser.add_argument("--gate", type=Path)
    parser.add_argument("--between", type=Path, help="a directory: say there who is between loops; wait for `go`")
    args = parser.parse_args()
    leave_in, leave_at = map(int, args.leave.split(":")) if args.leave else (-1, -1)

    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(512, 8, generator=generator), torch.randint(0, 4, (512,), generator=generator)
    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    data = torch.utils.data.TensorDataset(x, y)
    run = holdfast.join(model, optimizer, data, batch_size=32, shards=8, seed=3)
    loops = list(map(int, args.loops.split(",")))
    for number, until in enumerate(loops):
        for step in run.steps(until):
            wait_at(args.gate, run.id, step.number)
            for batch, labels in step:
                loss = F.cross_entropy(model(batch), labels)
                loss.backward()  # type: ignore[no-untyped-call]
                step.record(number=step.number, loss=loss)
                time.sleep(args.pause)
            optimizer.step()
            if until == leave_in and step.metrics["number"] >= leave_at:
                break
        if number == len(loops) - 1:
            break
        if args.evaluate and run.leader:
            time.sleep(args.evaluate)
        with torch.no_grad():
            model[0].weight.mul_(0.9)
            model(x)  # an evaluation that forgot .eval(): it changes the buffers
        optimizer.param_groups[0]["lr"] *= 0.7
        if args.between:
            args.between.joinpath(f"between-{number}-{WORKER}").touch()
            while args.between.joinpath(f"hold-{number}").exists():
                time.sleep(0.01)
    print("digest", run.digest())


if __name__ == "__main__":
    main()
