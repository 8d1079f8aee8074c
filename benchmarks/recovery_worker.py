"""A training script with a known step time that writes down each of its commits, for recovery.py.

    holdfast run --workers 4 benchmarks/recovery_worker.py --out /tmp/o --shards 8 --shard-time 0.02

Appends one line per step to `PID.commits`: the wall time of the commit, the step, how many shards this worker
computed for it, and how many seconds that took (see commits.py).
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
from torch.nn import functional as F

import holdfast
from workloads import SEED, WORKLOADS

ENDLESS = 1_000_000  # the harness ends the run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--workload", choices=WORKLOADS, default="1m")
    parser.add_argument("--optimizer", choices=("sgd", "adam"), default="sgd")
    parser.add_argument("--shards", type=int, required=True)
    parser.add_argument("--shard-time", type=float, default=0.0, metavar="S", help="a shard takes this long at least")
    args = parser.parse_args()

    workload = WORKLOADS[args.workload]
    model = workload.model()
    optimizer = workload.optimizer(model) if args.optimizer == "sgd" else torch.optim.Adam(model.parameters())
    run = holdfast.join(model, optimizer, workload.dataset(), batch_size=workload.batch, shards=args.shards, seed=SEED)
    with (args.out / f"{os.getpid()}.commits").open("ab", buffering=0) as commits:
        for step in run.steps(ENDLESS):
            shards, compute_s = 0, 0.0
            for x, y in step:
                start = time.perf_counter()
                F.cross_entropy(model(x), y).backward()
                # Sleeping rather than computing: four workers on two cores still take the time that they should.
                time.sleep(max(0.0, start + args.shard_time - time.perf_counter()))
                shards, compute_s = shards + 1, compute_s + time.perf_counter() - start
            optimizer.step()
            commits.write(f"{time.time():.6f} {step.number} {shards} {compute_s:.6f}\n".encode())


if __name__ == "__main__":
    main()
