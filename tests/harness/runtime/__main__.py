"""Run schedules from a shell: see the package."""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

from tests.harness.runtime import simulate
from tests.harness.runtime.scenario import Scenario

CHUNK = 250


def run_chunk(first: int, count: int) -> tuple[int, float]:
    """How many steps they took, and how many seconds of processor time."""
    torch.set_num_threads(1)
    began = time.process_time()
    steps = sum(simulate(seed).books.steps_applied for seed in range(first, first + count))
    return steps, time.process_time() - began


def main() -> int:
    """python -m tests.harness.runtime [--seed N [--trace] | --schedules N [--first N] [--jobs N] | SCENARIO.txt ...]"""
    parser = argparse.ArgumentParser(description="Run schedules of failures against the runtime that ships.")
    parser.add_argument("--seed", type=int, help="one schedule, by its seed")
    parser.add_argument("--trace", action="store_true", help="what happened, event for event")
    parser.add_argument("--schedules", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("scenarios", nargs="*", type=Path, help="files as in tests/simulator/scenarios")
    args = parser.parse_args()
    for path in args.scenarios:
        world = Scenario.parse(path.read_text()).play(keep_trace=args.trace)
        print("\n".join(world.lines or []), f"{path.name}: as expected", sep="\n" if args.trace else "")
    if args.scenarios:
        return 0
    if args.seed is not None:
        world = simulate(args.seed, keep_trace=args.trace)
        print("\n".join(world.lines or []))
        print(f"{world.schedule}\nno violation: {len(world.books.views)} views, {world.books.finishers} finished")
        return 0
    began, cpu_s, steps, done = time.monotonic(), 0.0, 0, 0
    with ProcessPoolExecutor(args.jobs) as pool:
        firsts = range(args.first, args.first + args.schedules, CHUNK)
        counts = [min(CHUNK, args.first + args.schedules - first) for first in firsts]
        for count, (more, took_s) in zip(counts, pool.map(run_chunk, firsts, counts), strict=True):
            done, steps, cpu_s = done + count, steps + more, cpu_s + took_s
            if done % 1000 == 0 or done == args.schedules:
                each_ms = 1000 * cpu_s / done
                print(f"{done:,} schedules, {steps:,} steps, no violation, {each_ms:.1f} ms each", flush=True)
    print(f"in {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
