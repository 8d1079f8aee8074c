"""What Keras' fit costs on Holdfast: one worker beside plain fit over the same micro-batches, and two beside one.

    python benchmarks/keras.py --check --json keras.json [--backends torch,jax,tensorflow] [--rounds 3]

A dense network of 1 M parameters, one compute thread a worker, a step of 512 samples in 8 shards; plain fit takes
batches of 64, which updates the weights eight times as often. Each figure is the best epoch after the first, the median
over rounds in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from arguments import conclude, listed

BACKENDS = ("tensorflow", "jax", "torch")
WORKER = str(Path(__file__).parent / "keras_fit" / "worker.py")  # not beside this file, which has Keras' own name
COST_MAX, GAIN_MIN = 1.1, 1.6


def measured(backend: str, workers: int, timeout_s: float) -> float:
    """Seconds of an epoch. No workers: plain fit."""
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3", "OMP_NUM_THREADS": "1"}
        environment["KERAS_HOME"] = str(Path(home, "keras"))
        command = [sys.executable, WORKER, "plain"]
        if workers:
            run = ["-m", "holdfast", "run", "--dir", home, "--workers", str(workers), "--lease", "30", "--run", "keras"]
            command = [sys.executable, *run, WORKER, "holdfast"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
    for line in done.stdout.splitlines():
        if "figures " in line:
            return float(json.loads(line.partition("figures ")[2])["epoch_s"])
    raise SystemExit(f"no figures of {backend} with {workers} workers:\n{(done.stdout + done.stderr)[-3000:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", type=listed(BACKENDS), default=list(BACKENDS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one process")
    parser.add_argument("--check", action="store_true", help="exit code 1 if a bar is missed")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    figures: dict[str, float] = {}
    missed: list[str] = []
    print("| backend | plain fit, s an epoch | one worker | its cost | two workers | their throughput |")
    print("|---|---|---|---|---|---|")
    for backend in args.backends:
        rounds = [[measured(backend, workers, args.timeout) for workers in (0, 1, 2)] for _ in range(args.rounds)]
        plain, one, two = (statistics.median(column) for column in zip(*rounds, strict=True))
        cost, gain = one / plain, one / two
        print(f"| {backend} | {plain:.3f} | {one:.3f} | {cost:.2f} | {two:.3f} | {gain:.2f} |", flush=True)
        figures |= {f"{backend}.plain_s": plain, f"{backend}.one_s": one, f"{backend}.two_s": two}
        figures |= {f"{backend}.cost": cost, f"{backend}.gain": gain}
        if cost > COST_MAX:
            missed.append(f"one worker on {backend} takes {cost:.2f} times as long as plain fit, at most {COST_MAX}")
        if gain < GAIN_MIN:
            missed.append(f"two workers on {backend} have {gain:.2f} times the throughput of one, at least {GAIN_MIN}")
    return conclude(args, figures, missed)


if __name__ == "__main__":
    sys.exit(main())
