"""One worker of the baseline: DistributedDataParallel on gloo, as its tutorial has it.

    python benchmarks/ddp_worker.py --workload 1m --rank 0 --workers 2 --rendezvous file:///tmp/r --out /tmp/o

`--profile` also says where a step's time goes. One compute thread per worker, which is torchrun's default.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from measuring import Measurement, write
from workloads import WORKLOADS, Batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--rendezvous", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--warmup", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)

    workload = WORKLOADS[args.workload]
    warmup, steps = args.warmup or workload.warmup, args.steps or workload.steps
    batches = Batches(workload, rank=args.rank, workers=args.workers)
    measurement = Measurement(warmup=warmup, batch=workload.batch)
    measurement.memory_before_model()

    dist.init_process_group("gloo", init_method=args.rendezvous, rank=args.rank, world_size=args.workers)
    model = DistributedDataParallel(workload.model())
    optimizer = workload.optimizer(model)
    for step in range(warmup + steps):
        x, y = batches.fetch(step)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        measurement.step_done()

    figures = measurement.figures()  # before the profile, which needs memory of its own
    if args.profile:
        figures |= profile(model, optimizer, batches, workload.parameters, steps)
    write(args.out, figures)
    dist.barrier()
    dist.destroy_process_group()


def profile(
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    batches: Batches,
    parameters: int,
    steps: int,
) -> dict[str, float]:
    """Median seconds of each part of a step, and of the all-reduce by itself."""
    parts: dict[str, list[float]] = {}

    def timed(name: str, work: Callable[[], Tensor]) -> Tensor:
        start = time.perf_counter()
        result = work()
        parts.setdefault(name, []).append(time.perf_counter() - start)
        return result

    for step in range(steps):
        x, y = timed("fetch_s", lambda step=step: batches.fetch(step))
        loss = timed("forward_s", lambda x=x, y=y: F.cross_entropy(model(x), y))
        timed("backward_s", loss.backward)
        timed("optimizer_s", optimizer.step)
        timed("zero_grad_s", optimizer.zero_grad)
    with model.no_sync():
        for step in range(steps):
            x, y = batches.fetch(step)
            loss = timed("forward_alone_s", lambda x=x, y=y: F.cross_entropy(model(x), y))
            timed("backward_alone_s", loss.backward)
            optimizer.zero_grad()
    gradients = torch.zeros(parameters)
    for _ in range(steps):
        timed("all_reduce_s", lambda: dist.all_reduce(gradients))
    return {name: statistics.median(times) for name, times in parts.items()}


if __name__ == "__main__":
    main()
