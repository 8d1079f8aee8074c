"""Run schedules from a shell: see the package."""

from __future__ import annotations

import argparse
import sys
import time

from tests.harness.agreement_simulator import simulate


def main() -> int:
    """python -m tests.harness.agreement_simulator [--seed N [--trace] | --schedules N]"""
    parser = argparse.ArgumentParser(description="Run schedules of failures and lies against server agreement.")
    parser.add_argument("--seed", type=int, help="one schedule, by its seed")
    parser.add_argument("--trace", action="store_true", help="with --seed: what happened, event for event")
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--first", type=int, default=0, help="the first seed of --schedules")
    args = parser.parse_args()
    if args.seed is not None:
        world = simulate(args.seed, keep_trace=args.trace)
        print("\n".join(world.lines or []))
        print(f"{world.schedule}\nno violation: {world.books.published} records")
        return 0
    began, records, views = time.process_time(), 0, 0
    for done in range(1, args.schedules + 1):
        world = simulate(args.first + done - 1)
        records, views = records + world.books.published, views + world.books.later_views
        if done % 500 == 0 or done == args.schedules:
            spent = time.process_time() - began
            print(
                f"{done:,} schedules, no violation: {records:,} records, {views:,} in later views, {spent:.0f} s",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
