"""One worker of Holdfast, doing the work of ddp_worker.py.

    holdfast run --workers 2 --path network benchmarks/holdfast_worker.py --workload 1m --workers 2 --out /tmp/o

One shard per worker, so that a worker computes exactly the batch that it would under DistributedDataParallel.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from torch.nn import functional as F

import holdfast
from measuring import Measurement, write
from workloads import SEED, WORKLOADS, shard


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--warmup", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument(
        "--sharded", action="store_true", help="over the ranks of a group; --workers are all ranks then"
    )
    args = parser.parse_args()

    workload = WORKLOADS[args.workload]
    warmup, steps = args.warmup or workload.warmup, args.steps or workload.steps
    dataset = workload.dataset()
    measurement = Measurement(warmup=warmup, batch=workload.batch)
    measurement.memory_before_model()

    model = workload.model()
    if args.sharded:
        shard(model, holdfast.group().mesh)
    optimizer = workload.optimizer(model)
    run = holdfast.join(model, optimizer, dataset, batch_size=workload.batch, shards=args.workers, seed=SEED)
    for step in run.steps(warmup + steps):
        for x, y in step:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
        optimizer.step()
        measurement.step_done()
    write(args.out, measurement.figures())


if __name__ == "__main__":
    main()
