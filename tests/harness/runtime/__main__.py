"""Run schedules from a shell: see the package."""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any

import torch

from tests.harness.runtime import Violation, simulate
from tests.harness.runtime.faults import ANYWHERE, BETWEEN_HOSTS
from tests.harness.runtime.scenario import Scenario

CHUNK = 250


def run_chunk(first: int, count: int, changes: dict[str, Any]) -> tuple[int, float, list[str]]:
    """How many steps they took, how many seconds of processor time, and what was violated."""
    torch.set_num_threads(1)
    began, steps, violations = time.process_time(), 0, []
    for seed in range(first, first + count):
        try:
            steps += simulate(seed, **changes).books.steps_applied
        except Violation as violation:
            violations.append(str(violation).splitlines()[0])
    return steps, time.process_time() - began, violations


def main() -> int:
    """python -m tests.harness.runtime [--seed N [--trace] | --schedules N [--first N] [--fault KIND] | SCENARIO...]"""
    parser = argparse.ArgumentParser(description="Run schedules of failures against the runtime that ships.")
    parser.add_argument("--seed", type=int, help="one schedule, by its seed")
    parser.add_argument("--trace", action="store_true", help="what happened, event for event")
    parser.add_argument("--schedules", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--fault", choices=sorted({*ANYWHERE, *BETWEEN_HOSTS}), help="all faults are of this kind")
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
    changes = {"fault": args.fault, "faults": 6} if args.fault else {}
    return sweep(args.first, args.schedules, args.jobs, changes)


def sweep(first: int, schedules: int, jobs: int, changes: dict[str, Any]) -> int:
    """All of them, whatever fails. 1: something did."""
    began, cpu_s, steps, done, failed = time.monotonic(), 0.0, 0, 0, 0
    with ProcessPoolExecutor(jobs) as pool:
        firsts = range(first, first + schedules, CHUNK)
        counts = [min(CHUNK, first + schedules - one) for one in firsts]
        found = pool.map(run_chunk, firsts, counts, repeat(changes))
        for count, (more, took_s, violations) in zip(counts, found, strict=True):
            done, steps, cpu_s, failed = done + count, steps + more, cpu_s + took_s, failed + len(violations)
            for violation in violations:
                print(violation, flush=True)
            if done % 1000 == 0 or done == schedules:
                words = f"{failed} violations" if failed else "no violation"
                each_ms = 1000 * cpu_s / done
                print(f"{done:,} schedules, {steps:,} steps, {words}, {each_ms:.1f} ms each", flush=True)
    print(f"seeds {first} to {first + schedules - 1} in {time.monotonic() - began:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
