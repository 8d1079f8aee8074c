"""What people's own trainers cost on Holdfast: a step with one worker beside one without Holdfast.

    python benchmarks/trainers.py --check --json trainers.json [--trainers lightning,trainer,accelerate] [--rounds 5]

Lightning and an Accelerate loop train a dense network of 1 M parameters, the Hugging Face Trainer a small GPT-2, one
compute thread each. A step accumulates eight micro-batches, the same in both. Each figure is the median step of a
process, and of these the median over rounds in turn.
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

TRAINERS = ("lightning", "trainer", "accelerate")
WORKER = str(Path(__file__).parent / "trainer_steps" / "worker.py")
COST_MAX = 1.05


def measured(trainer: str, how: str, steps: int, timeout_s: float) -> float:
    """Seconds of a step."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory() as home:
        script = [WORKER, trainer, how, "--steps", str(steps)]
        command = [sys.executable, *script]
        if how == "holdfast":
            run = ["-m", "holdfast", "run", "--dir", home, "--workers", "1", "--lease", "30", "--run", "trainers"]
            command = [sys.executable, *run, *script]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False)
    for line in done.stdout.splitlines():
        if "figures " in line:
            return float(json.loads(line.partition("figures ")[2])["step_s"])
    raise SystemExit(f"no figures of {trainer}, {how}:\n{(done.stdout + done.stderr)[-3000:]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trainers", type=listed(TRAINERS), default=list(TRAINERS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for one process")
    parser.add_argument("--check", action="store_true", help="exit code 1 if a bar is missed")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    figures: dict[str, float] = {}
    missed: list[str] = []
    print("| trainer | without Holdfast, ms a step | one worker | its cost |")
    print("|---|---|---|---|")
    for trainer in args.trainers:
        rounds = [
            [measured(trainer, how, args.steps, args.timeout) for how in ("plain", "holdfast")]
            for _ in range(args.rounds)
        ]
        plain, one = (statistics.median(column) for column in zip(*rounds, strict=True))
        cost = one / plain
        print(f"| {trainer} | {plain * 1e3:.1f} | {one * 1e3:.1f} | {cost:.3f} |", flush=True)
        figures |= {f"{trainer}.plain_s": plain, f"{trainer}.one_s": one, f"{trainer}.cost": cost}
        if cost > COST_MAX:
            missed.append(f"a step of {trainer} takes {cost:.3f} times as long with one worker, at most {COST_MAX}")
    return conclude(args, figures, missed)


if __name__ == "__main__":
    sys.exit(main())
