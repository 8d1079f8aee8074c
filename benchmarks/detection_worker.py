"""A training script that can be made to hang, for detection.py. It writes down its commits as recovery_worker.py does.

    holdfast run --workers 4 benchmarks/detection_worker.py --out /tmp/o --shards 8 --shard-time 0.1 --delays 0.2

A file `deadlock` in --out names the process that takes a lock twice in its next shard; a file `evaluate` names a step
after which every worker evaluates, asleep, for so many seconds: "120 30".
"""

from __future__ import annotations

import argparse
import os
import random
import threading
import time
from pathlib import Path

from torch.nn import functional as F

import holdfast
from workloads import SEED, WORKLOADS

ENDLESS = 1_000_000  # the harness ends the run
DELAY_S_MAX = 1.0
lock = threading.Lock()


def take_a_lock_twice() -> None:
    with lock, lock:
        pass


def evaluate(seconds: float) -> None:
    time.sleep(seconds)


def words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except FileNotFoundError:
        return []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shards", type=int, required=True)
    parser.add_argument("--shard-time", type=float, default=0.0, metavar="S", help="a shard takes this long at least")
    parser.add_argument("--delays", type=float, default=0.0, help="this share of shards takes up to a second longer")
    args = parser.parse_args()

    chance = random.Random(os.getpid())
    me = str(os.getpid())
    workload = WORKLOADS["1m"]
    model = workload.model()
    optimizer = workload.optimizer(model)
    run = holdfast.join(model, optimizer, workload.dataset(), batch_size=workload.batch, shards=args.shards, seed=SEED)
    with (args.out / f"{me}.commits").open("ab", buffering=0) as commits:
        for step in run.steps(ENDLESS):
            shards, compute_s = 0, 0.0
            for x, y in step:
                start = time.perf_counter()
                if words(args.out / "deadlock") == [me]:
                    take_a_lock_twice()
                F.cross_entropy(model(x), y).backward()
                # Sleeping rather than computing: four workers on two cores still take the time that they should.
                time.sleep(max(0.0, start + args.shard_time - time.perf_counter()))
                if chance.random() < args.delays:
                    time.sleep(chance.uniform(0.0, DELAY_S_MAX))
                shards, compute_s = shards + 1, compute_s + time.perf_counter() - start
            run.optimizer.step()
            commits.write(f"{time.time():.6f} {step.number} {shards} {compute_s:.6f}\n".encode())
            asked = words(args.out / "evaluate")
            if asked and int(asked[0]) == step.number:
                evaluate(float(asked[1]))


if __name__ == "__main__":
    main()
