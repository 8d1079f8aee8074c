"""What could be gained by reducing while the last shard's backward pass still runs?

    python benchmarks/overlap.py
    python benchmarks/overlap.py --workers 2 --workload 25m --json overlap.json

Two ways to end a step, in turn: the last shard's forward and backward pass, then the reduction; and both at once, the
reduction in a thread of its own from the start of the forward pass. The second is not a correct step: it reduces
gradients that are not there yet. It is the best that any overlap could do, since buckets are ready only as the
backward pass goes on. The ratio of the two times is therefore an upper bound on the gain at the end of a step. A step
has several shards on each worker and only the last can overlap, so the bound for a whole step is smaller: it is shown
for a worker with `--shards` shards. Decision 3 rests on these figures.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from pathlib import Path

import torch
import torch.distributed as dist

from holdfast.reduce.arena import Arena
from holdfast.reduce.layout import Layout
from transport import Worker, connect, together
from workloads import WORKLOADS, Workload

PATHS = ("shared_memory", "network")
WAYS = ("compute", "after", "during")
REPEATS = 9


def backward(workload: Workload, shard: int) -> Callable[[], None]:
    model = workload.model()
    x = torch.randn(shard, workload.widths[0])
    y = torch.zeros(shard, dtype=torch.int64)

    def act() -> None:
        model.zero_grad(set_to_none=True)
        torch.nn.functional.cross_entropy(model(x), y).backward()

    return act


def ways(compute: Callable[[], None], reduce: Callable[[], object]) -> dict[str, Callable[[], object]]:
    def after() -> None:
        compute()
        reduce()

    def during() -> None:
        thread = threading.Thread(target=reduce)
        thread.start()
        compute()
        thread.join()

    return {"compute": compute, "after": after, "during": during}


def work(rank: int, worker: Worker, workload: Workload, shard: int, rendezvous: str, pipe: Pipe) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=len(worker.members))
    worker.prepare(workload.parameters)
    compute = backward(workload, shard)
    times: dict[str, list[float]] = {f"{path} {way}": [] for path in PATHS for way in WAYS}
    actions = {path: ways(compute, worker.action(path)) for path in PATHS}
    for repeat in range(REPEATS + 1):
        for path in PATHS:
            for way in WAYS:
                dist.barrier()
                start = time.perf_counter()
                actions[path][way]()
                if repeat:
                    times[f"{path} {way}"].append(time.perf_counter() - start)
    pipe.send(times)
    dist.destroy_process_group()


def measure(count: int, workload: Workload, shard: int) -> dict[str, float]:
    layout = Layout([torch.empty(workload.parameters, device="meta")])
    arenas = [Arena.create(count, layout.slot_bytes) for _ in range(count)]
    pairs = connect(count)
    results = together(work, [(rank, Worker(rank, count, pairs, arenas), workload, shard) for rank in range(count)])
    for sock in pairs.values():
        sock.close()
    return {
        name: statistics.median(max(times) for times in zip(*(result[name] for result in results), strict=True))
        for name in results[0]
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="1,2")
    parser.add_argument("--workload", default="1m,25m")
    parser.add_argument("--shards", type=int, default=4, help="of each worker")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--check", action="store_true", help="there is no bar: it tells what an overlap could gain")
    args = parser.parse_args()
    figures: dict[str, float] = {}
    print(
        f"{'parameters':>10} {'workers':>7} {'path':>14} {'shard ms':>9} {'after ms':>9} {'during ms':>9} {'bound':>6}"
    )
    for name in args.workload.split(","):
        workload = WORKLOADS[name]
        for count in map(int, args.workers.split(",")):
            shard = max(1, workload.batch // (max(count, 2) * args.shards))
            found = measure(count, workload, shard)
            for path in PATHS:
                compute, after, during = (found[f"{path} {way}"] for way in WAYS)
                others = (args.shards - 1) * compute
                bound = (others + after) / (others + during)
                figures |= {f"bound_{path}_{name}_{count}": bound, f"end_{path}_{name}_{count}": after / during}
                print(
                    f"{name:>10} {count:>7} {path:>14} {compute * 1e3:>9.1f} {after * 1e3:>9.1f} "
                    f"{during * 1e3:>9.1f} {bound:>6.2f}",
                    flush=True,
                )
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    sys.exit(main())
