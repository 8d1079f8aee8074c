"""One rank of HSDP: FSDP2 over a mesh of pairs on gloo, the work of ddp_worker.py.

python benchmarks/hsdp_worker.py --workload 1m --rank 0 --workers 4 --rendezvous file:///tmp/r --out /tmp/o
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from measuring import Measurement, write
from workloads import WORKLOADS, Batches, shard

RANKS = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--rendezvous", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--warmup", type=int)
    parser.add_argument("--steps", type=int)
    args = parser.parse_args()
    torch.set_num_threads(1)

    workload = WORKLOADS[args.workload]
    warmup, steps = args.warmup or workload.warmup, args.steps or workload.steps
    batches = Batches(workload, rank=args.rank, workers=args.workers)
    measurement = Measurement(warmup=warmup, batch=workload.batch)
    measurement.memory_before_model()

    dist.init_process_group("gloo", init_method=args.rendezvous, rank=args.rank, world_size=args.workers)
    mesh = init_device_mesh("cpu", (args.workers // RANKS, RANKS), mesh_dim_names=("replicate", "shard"))
    model = workload.model()
    shard(model, mesh)
    optimizer = workload.optimizer(model)
    for step in range(warmup + steps):
        x, y = batches.fetch(step)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        measurement.step_done()
    write(args.out, measurement.figures())
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
