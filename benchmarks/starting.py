"""What it takes to start a worker: forked from a process with its imports, and as a command of its own.

    python benchmarks/starting.py                        # about a minute
    python benchmarks/starting.py --check --json f.json

Two workers train examples/digits.py, one is killed again and again, and of each replacement are taken: the processor
time that it has used, and the time that has passed, from its start until it registers. `first`: from the command
`holdfast run` until all workers are registered. Medians; warm and cold take turns.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

from arguments import conclude
from holdfast.core.options.run import COLD, STARTS, WARM
from holdfast.placement.proc import family_cpu_s
from holdfast.testing.observed_run import Failed, ObservedRun

WORKERS = 2
SCRIPT = Path(__file__).parents[1] / "examples" / "digits.py"
SHARE_MAX = 0.25  # of a cold start's processor time


def measure(start: str, kills: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"first": [], "cpu": [], "wall": []}
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as name:
        options = ["--workers", str(WORKERS), "--checkpoint", "none", "--start", start]
        run = ObservedRun(Path(name), "bench", options, [str(SCRIPT), "--slow", "0.05", "--steps", "1000000"])
        began = time.monotonic()
        try:
            run.start()
            run.wait(lambda: len(run.living_registered()) == WORKERS, "the workers", period_s=0.002)
            found["first"].append(time.monotonic() - began)
            for _ in range(kills):
                cpu_s, wall_s = replace_one(run)
                found["cpu"].append(cpu_s)
                found["wall"].append(wall_s)
        finally:
            run.end()
    return found


def replace_one(run: ObservedRun) -> tuple[float, float]:
    run.wait(lambda: len(run.living_members()) == WORKERS, "a whole crew")
    step = run.step
    run.wait(lambda: run.step > step + 3, "a few steps")
    victim = run.living_members()[0]
    known = set(run.registered)
    os.kill(run.pids[victim], signal.SIGKILL)
    began = time.monotonic()
    run.wait(lambda: bool(run.registered - known), "its replacement", period_s=0.002)
    (new,) = run.registered - known
    return family_cpu_s(run.pids[new]), time.monotonic() - began


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=4, help="replacements of each run")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--check", action="store_true", help="exit with 1 if the bar is missed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, by name")
    args = parser.parse_args()
    samples: dict[str, list[float]] = {}
    try:
        for _ in range(args.rounds):
            for start in STARTS:
                for name, values in measure(start, args.kills).items():
                    samples.setdefault(f"{name}_s_{start}", []).extend(values)
    except Failed as error:
        print(f"starting: {error}", file=sys.stderr)
        return 1
    figures = {name: statistics.median(values) for name, values in samples.items()}
    print(f"{'':<6} {'first':>8} {'replaced':>9} {'processor':>10}")
    for start in STARTS:
        first, wall, cpu = (figures[f"{name}_s_{start}"] for name in ("first", "wall", "cpu"))
        print(f"{start:<6} {first:>6.2f} s {wall:>7.2f} s {cpu:>8.2f} s")
    figures["cpu_share"] = figures[f"cpu_s_{WARM}"] / figures[f"cpu_s_{COLD}"]
    share = figures["cpu_share"]
    missed = [f"cpu_share is {share:.2f}, above {SHARE_MAX}"] if share > SHARE_MAX else []
    return conclude(args, figures, missed)


if __name__ == "__main__":
    sys.exit(main())
