"""Run schedules from a shell: see the package."""

from __future__ import annotations

import argparse
import sys
import time

from tests.harness.log_simulator import simulate


def main() -> int:
    """python -m tests.harness.log_simulator [--seed N [--trace] | --schedules N]"""
    parser = argparse.ArgumentParser(description="Run schedules of failures against the machine of replicated logs.")
    parser.add_argument("--seed", type=int, help="one schedule, by its seed")
    parser.add_argument("--trace", action="store_true", help="with --seed: what happened, event for event")
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed of --schedules")
    args = parser.parse_args()
    if args.seed is not None:
        world = simulate(args.seed, keep_trace=args.trace)
        print("\n".join(world.lines or []))
        print(f"{world.schedule}\nno violation: {len(world.books.acknowledged)} updates acknowledged")
        return 0
    began, updates, reads = time.process_time(), 0, 0
    for done in range(1, args.schedules + 1):
        books = simulate(args.first + done - 1).books
        updates, reads = updates + len(books.acknowledged), reads + books.fresh_reads
        if done % 1000 == 0 or done == args.schedules:
            spent = time.process_time() - began
            print(
                f"{done:,} schedules, no violation: {updates:,} updates, {reads:,} fresh reads, {spent:.0f} s",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
