"""Trains with shards that take a set time, as on an accelerator; one worker is slow, or pauses now and then.

    holdfast run --workers 4 benchmarks/straggler_worker.py --out /tmp/o --slow w3 --times 5 --from-step 60

A shard waits and computes a little: what is measured is the waiting for each other, not the cores. Every worker leaves
`WORKER.json` with when each step ended, and the digest of the weights.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import holdfast

WIDTH, CLASSES = 64, 10


def freeze(seconds: float) -> None:
    """Stop this process, heartbeats and lease and all, until somebody else wakes it."""
    me = os.getpid()
    waker = subprocess.Popen(["/bin/sh", "-c", f"sleep {seconds}; kill -CONT {me}"])
    os.kill(me, signal.SIGSTOP)
    waker.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--shards", type=int, default=32)
    parser.add_argument("--shard-s", type=float, default=0.01)
    parser.add_argument("--slow", default="", metavar="SLOT", help="such as w3")
    parser.add_argument("--times", type=float, default=1.0, help="how many times longer a shard takes it")
    parser.add_argument("--pause", type=float, default=0.0, metavar="S", help="it pauses so long ...")
    parser.add_argument("--every", type=float, default=10.0, metavar="S", help="... every so many seconds")
    parser.add_argument("--freeze", action="store_true", help="its whole process pauses: SIGSTOP, and SIGCONT")
    parser.add_argument("--from-step", type=int, default=0)
    parser.add_argument("--samples", type=int, default=4096)
    parser.add_argument("--mode", default="exact")
    parser.add_argument("--quorum", type=int)
    args = parser.parse_args()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, CLASSES))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(args.samples, WIDTH, generator=generator)
    dataset = TensorDataset(x, torch.randint(CLASSES, (args.samples,), generator=generator))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    batch = 2 * args.shards
    mode = holdfast.Elastic(quorum=args.quorum) if args.mode == "elastic" else holdfast.Exact()
    run = holdfast.join(
        model, optimizer, dataset, batch_size=batch, drop_last=True, shards=args.shards, seed=0, mode=mode
    )
    straggles = bool(args.slow) and run.id.startswith(f"{args.slow}.")
    ends: dict[int, float] = {}
    samples: dict[int, int] = {}
    paused_at = 0.0
    for step in run.steps(args.steps):
        disturbed = straggles and step.number >= args.from_step
        if disturbed and not paused_at:
            paused_at = time.monotonic()
        for x, y in step:
            if disturbed and args.pause and time.monotonic() - paused_at >= args.every:
                paused_at = time.monotonic()
                (freeze if args.freeze else time.sleep)(args.pause)
            time.sleep(args.shard_s * (args.times if disturbed else 1.0))
            F.cross_entropy(model(x), y).backward()
        run.optimizer.step()
        ends[step.number], samples[step.number] = time.monotonic(), step.samples
    left = {"ends": ends, "samples": samples, "digest": run.digest()}
    (args.out / f"{run.id}.json").write_text(json.dumps(left))


if __name__ == "__main__":
    main()
