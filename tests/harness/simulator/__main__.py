"""Run schedules from a shell: see the package."""

from __future__ import annotations

import argparse
import sys

from tests.harness.simulator import simulate


def main() -> int:
    """python -m tests.harness.simulator [--seed N [--trace] | --schedules N]"""
    parser = argparse.ArgumentParser(description="Run schedules of failures against the protocol's machine.")
    parser.add_argument("--seed", type=int, help="one schedule, by its seed")
    parser.add_argument("--trace", action="store_true", help="with --seed: what happened, event for event")
    parser.add_argument("--schedules", type=int, default=10_000)
    args = parser.parse_args()
    if args.seed is not None:
        world = simulate(args.seed, keep_trace=args.trace)
        print("\n".join(world.lines or []))
        print(f"{world.schedule}\nno violation: {world.steps_committed} steps, {len(world.views)} views")
        return 0
    for seed in range(args.schedules):
        simulate(seed)
        if (seed + 1) % 10_000 == 0:
            print(f"{seed + 1:,} schedules, no violation", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
