"""One of four workers is slow, or pauses: exact mode against elastic mode with a quorum of three.

    python benchmarks/elastic.py                       # about 2 minutes
    python benchmarks/elastic.py --check --json f.json
    python benchmarks/elastic.py --quick --cases slow

A step has 16 shards of 20 ms, in which a worker waits as for an accelerator. In the middle of a run one worker becomes
slow. Exact mode moves its shards to the others, and waits for it where that comes too late. A quorum does not wait: the
other three should keep the speed that they had, with fewer samples in a step. All must end with the same weights.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from arguments import conclude, listed
from launching import BenchmarkError, holdfast_command, run_to_end

WORKERS, QUORUM = 4, 3
SHARDS, SHARD_S = 16, 0.02
SAMPLES = 16384  # one epoch is longer than the run: at its end the last shards may be the late worker's
WARM_UP, QUIET_STEPS, STEPS = 10, 60, 150
TIMEOUT_S = 300.0
CASES = {"slow": ["--times", "5"], "pausing": ["--pause", "2", "--every", "6"]}
MODES = {"exact": [], "quorum": ["--mode", "elastic", "--quorum", str(QUORUM)]}
KEPT_MIN = 0.9  # the bar: of the steps per second before


def train(options: list[str], steps: int) -> dict[str, Any]:
    """What the first worker left."""
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as name:
        home = Path(name)
        command = holdfast_command(
            home, run="bench", workers=WORKERS, script="straggler_worker.py", options=["--checkpoint", "none"]
        )
        common = ["--out", str(home), "--steps", str(steps), "--shards", str(SHARDS), "--shard-s", str(SHARD_S)]
        common += ["--samples", str(SAMPLES)]
        run_to_end([[*command, *common, *options]], home / "log", timeout_s=TIMEOUT_S)
        left = [json.loads(path.read_text()) for path in sorted(home.glob("w*.json"))]
        if len(left) != WORKERS or len({one["digest"] for one in left}) != 1:
            raise BenchmarkError(f"{len(left)} workers ended, with {len({one['digest'] for one in left})} digests")
        first: dict[str, Any] = left[0]
        return first


def rates(left: dict[str, Any], first: int, last: int) -> tuple[float, float]:
    """Steps per second, samples per second."""
    took_s = left["ends"][str(last)] - left["ends"][str(first)]
    return (last - first) / took_s, sum(left["samples"][str(step)] for step in range(first + 1, last + 1)) / took_s


def measure(case: str, mode: str, quick: bool) -> dict[str, float]:
    total = QUIET_STEPS + (STEPS // 2 if quick else STEPS)
    left = train(["--slow", "w3", "--from-step", str(QUIET_STEPS), *CASES[case], *MODES[mode]], total)
    before, _ = rates(left, WARM_UP, QUIET_STEPS - 1)
    after, samples = rates(left, QUIET_STEPS, total - 1)
    return {
        f"quiet_steps_per_s_{case}_{mode}": before,
        f"steps_per_s_{case}_{mode}": after,
        f"kept_{case}_{mode}": after / before,
        f"samples_per_s_{case}_{mode}": samples,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=listed(list(CASES)), default=list(CASES))
    parser.add_argument("--quick", action="store_true", help="half of the steps")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, by name")
    args = parser.parse_args()
    figures: dict[str, float] = {}
    print(f"{'':<8} {'mode':<7} {'steps/s before':>14} {'with it':>8} {'kept':>5} {'samples/s':>9}")
    for case in args.cases:
        for mode in MODES:
            try:
                found = measure(case, mode, args.quick)
            except BenchmarkError as error:
                print(f"elastic: {error}", file=sys.stderr)
                return 1
            figures |= found
            before, after, kept, samples = found.values()
            print(f"{case:<8} {mode:<7} {before:>14.2f} {after:>8.2f} {kept:>5.2f} {samples:>9.0f}", flush=True)
    missed = [
        f"{name} is {figures[name]:.2f}, below {KEPT_MIN:g}"
        for name in figures
        if name.startswith("kept") and name.endswith("quorum") and figures[name] < KEPT_MIN
    ]
    return conclude(args, figures, missed)


if __name__ == "__main__":
    sys.exit(main())
