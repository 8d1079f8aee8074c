"""One worker of Holdfast, doing the work of ddp_worker.py.

    holdfast run --workers 2 --path network benchmarks/holdfast_worker.py --workload 1m --workers 2 --out /tmp/o

One shard per worker, so that a worker computes exactly the batch that it would under DistributedDataParallel.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch.nn import functional as F

import holdfast
from holdfast.state.local import local
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
    write(args.out, {**measurement.figures(), "held_bytes": held_bytes(model, optimizer)})


def held_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Of parameters, gradients and the optimizer's state: the memory behind them in this process, each once."""
    tensors = [*model.parameters(), *(one.grad for one in model.parameters() if one.grad is not None)]
    tensors += [one for state in optimizer.state.values() for one in state.values() if isinstance(one, torch.Tensor)]
    storages = [local(tensor).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


if __name__ == "__main__":
    main()
