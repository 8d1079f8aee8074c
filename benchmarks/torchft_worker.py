"""One worker of torchft, doing the work of ddp_worker.py: a replica group of one process each.

    python benchmarks/torchft_worker.py --workload 1m --rank 0 --workers 2 --out /tmp/o

Rank 0 also serves the lighthouse, and tells the others its address through a file.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.coordination import LighthouseServer

from measuring import Measurement, write
from workloads import WORKLOADS, Batches

LIGHTHOUSE_WAIT_S = 60.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--workers", type=int, required=True)
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

    lighthouse = serve_lighthouse(args.out, args.workers) if args.rank == 0 else None
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    plain_model = workload.model()
    plain_optimizer = workload.optimizer(plain_model)

    def load_state_dict(state: dict) -> None:
        plain_model.load_state_dict(state["model"])
        plain_optimizer.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(),
        load_state_dict=load_state_dict,
        state_dict=lambda: {"model": plain_model.state_dict(), "optimizer": plain_optimizer.state_dict()},
        min_replica_size=args.workers,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=lighthouse_address(args.out),
        replica_id=f"rank{args.rank}",
        hostname="127.0.0.1",
    )
    model = DistributedDataParallel(manager, plain_model)
    optimizer = Optimizer(manager, plain_optimizer)
    for step in range(warmup + steps):
        x, y = batches.fetch(step)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        measurement.step_done()

    write(args.out, measurement.figures())
    wait_for_all(args.out, args.workers)  # the lighthouse goes with rank 0
    manager.shutdown(wait=False)
    if lighthouse is not None:
        lighthouse.shutdown()
    os._exit(0)  # its threads would wait for peers that have gone


def serve_lighthouse(directory: Path, workers: int) -> LighthouseServer:
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=workers, join_timeout_ms=100)
    port = lighthouse.address().rpartition(":")[2]
    unfinished = directory / "lighthouse.tmp"
    unfinished.write_text(f"http://127.0.0.1:{port}")
    unfinished.replace(directory / "lighthouse")
    return lighthouse


def lighthouse_address(directory: Path) -> str:
    deadline = time.monotonic() + LIGHTHOUSE_WAIT_S
    while not (directory / "lighthouse").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return (directory / "lighthouse").read_text()


def wait_for_all(directory: Path, workers: int) -> None:
    deadline = time.monotonic() + LIGHTHOUSE_WAIT_S
    while len(list(directory.glob("*.json"))) < workers and time.monotonic() < deadline:
        time.sleep(0.02)


if __name__ == "__main__":
    main()
