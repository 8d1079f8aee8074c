"""A worker of benchmarks/horovod.py: the same collectives by holdfast.horovod and by gloo, in turns, in one process.

holdfast run --workers N benchmarks/horovod_worker.py OUTPUT ROUNDS SIZE...
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import holdfast.horovod.torch as hvd

PARAMETERS = 25_000_000
SECONDS = 0.15  # about as long is each turn


def measure(ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int) -> dict[str, float]:
    """Seconds a call, medians over turns; the ratio is the median over the turns' ratios."""
    times: dict[str, list[float]] = {"ours": [], "gloo": []}
    for call in (ours, theirs):
        call()
    began = time.perf_counter()
    ours()
    theirs()
    count = torch.tensor([max(1.0, min(500.0, SECONDS / (time.perf_counter() - began)))])
    calls = int(hvd.allreduce(count, op=hvd.Min).item())
    for _ in range(rounds):
        for name, call in (("ours", ours), ("gloo", theirs)):
            dist.barrier()
            began = time.perf_counter()
            for _ in range(calls):
                call()
            times[name].append((time.perf_counter() - began) / calls)
    ratios = [theirs_s / ours_s for ours_s, theirs_s in zip(times["ours"], times["gloo"], strict=True)]
    return {
        "ours_s": statistics.median(times["ours"]),
        "gloo_s": statistics.median(times["gloo"]),
        "ratio": statistics.median(ratios),
    }


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    width = 1536
    layers = [torch.nn.Linear(width, width) for _ in range(round(PARAMETERS / width / (width + 1)))]
    return torch.nn.Sequential(*layers)


def training_step(rounds: int) -> dict[str, float]:
    plain, wrapped = model(), model()
    batch = torch.rand(2, 1536)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(plain.parameters(), lr=1e-4), plain.named_parameters())
    parallel = DistributedDataParallel(wrapped)
    other = torch.optim.SGD(wrapped.parameters(), lr=1e-4)

    def ours() -> None:
        optimizer.zero_grad(set_to_none=False)
        plain(batch).square().mean().backward()
        optimizer.step()

    def theirs() -> None:
        other.zero_grad(set_to_none=False)
        parallel(batch).square().mean().backward()
        other.step()

    return measure(ours, theirs, rounds)


def main(output: Path, rounds: int, sizes: list[int]) -> None:
    hvd.init()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(output) + ".store", hvd.size())
    dist.init_process_group("gloo", store=store, rank=hvd.rank(), world_size=hvd.size())
    found = {}
    for size in sizes:
        ours, theirs = torch.ones(max(1, size // 4)), torch.ones(max(1, size // 4))
        found[str(size)] = measure(
            lambda ours=ours: hvd.allreduce_(ours, op=hvd.Sum),  # type: ignore[misc]
            lambda theirs=theirs: dist.all_reduce(theirs, op=dist.ReduceOp.SUM),  # type: ignore[misc]
            rounds,
        )
    found["step"] = training_step(rounds)
    if hvd.rank() == 0:
        output.write_text(json.dumps(found))
    hvd.barrier()
    dist.destroy_process_group()


main(Path(sys.argv[1]), int(sys.argv[2]), [int(word) for word in sys.argv[3:]])
