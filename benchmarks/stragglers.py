"""One of four workers is slow, or pauses: how much of what the others and it could do together is done?

    python benchmarks/stragglers.py                       # all cases, about 6 minutes
    python benchmarks/stragglers.py --check --json f.json
    python benchmarks/stragglers.py --quick --cases slow

A step has 32 shards of 10 ms, in which a worker waits as for an accelerator. In the middle of a run one worker becomes
slow and stays so, or pauses now and then: its script waits (`pausing`), or its whole process is stopped and woken again
(`frozen`). Ideal is the speed of the same run before that, times the capacity that is left: 3.2 of 4 workers
with one that takes 5 times as long, 3.8 of 4 with one that pauses for 2 s every 10 s. What the others need to notice
counts. The weights at the end must be those of a run without a straggler.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arguments import conclude, listed
from launching import BenchmarkError, holdfast_command, run_to_end

WORKERS = 4
SHARDS, SHARD_S = 32, 0.01
WARM_UP = 10  # steps
TIMEOUT_S = 300.0
IDEAL_MIN = 0.9  # the bar


@dataclass(frozen=True)
class Case:
    name: str
    options: tuple[str, ...]
    capacity: float  # that is left, of WORKERS
    steps: int  # with the straggler

    @property
    def ideal(self) -> float:
        return self.capacity / WORKERS


CASES = (
    Case("slow", ("--times", "5"), WORKERS - 0.8, 250),
    Case("pausing", ("--pause", "2", "--every", "10"), WORKERS - 0.2, 600),
    Case("frozen", ("--pause", "2", "--every", "10", "--freeze"), WORKERS - 0.2, 600),
)
QUIET_STEPS = 120


def train(options: list[str], steps: int) -> dict[str, Any]:
    """What the first worker left."""
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as name:
        home = Path(name)
        command = holdfast_command(
            home, run="bench", workers=WORKERS, script="straggler_worker.py", options=["--checkpoint", "none"]
        )
        common = ["--out", str(home), "--steps", str(steps), "--shards", str(SHARDS), "--shard-s", str(SHARD_S)]
        run_to_end([[*command, *common, *options]], home / "log", timeout_s=TIMEOUT_S)
        left = [json.loads(path.read_text()) for path in sorted(home.glob("w*.json"))]
        if not left or len({one["digest"] for one in left}) != 1:
            raise BenchmarkError(f"{len(left)} workers ended, with {len({one['digest'] for one in left})} digests")
        longest: dict[str, Any] = max(left, key=lambda one: len(one["ends"]))
        return longest


def rate(ends: dict[str, float], first: int, last: int) -> float:
    """Steps per second."""
    return (last - first) / (ends[str(last)] - ends[str(first)])


def measure(case: Case, quick: bool) -> dict[str, float]:
    steps = case.steps // 4 if quick else case.steps
    total = QUIET_STEPS + steps
    disturbed = train(["--slow", "w3", "--from-step", str(QUIET_STEPS), *case.options], total)
    ends = disturbed["ends"]
    before = rate(ends, WARM_UP, QUIET_STEPS - 1)
    after = rate(ends, QUIET_STEPS, total - 1)
    return {
        f"quiet_steps_per_s_{case.name}": before,
        f"steps_per_s_{case.name}": after,
        f"of_ideal_{case.name}": after / (before * case.ideal),
        f"exact_{case.name}": float(disturbed["digest"] == train([], total)["digest"]),
    }


def main() -> int:
    names = [case.name for case in CASES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=listed(names), default=names)
    parser.add_argument("--quick", action="store_true", help="a quarter of the steps")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, by name")
    args = parser.parse_args()
    figures: dict[str, float] = {}
    print(f"{'':<10} {'steps/s before':>14} {'with it':>8} {'of ideal':>8}  weights")
    for case in CASES:
        if case.name not in args.cases:
            continue
        try:
            found = measure(case, args.quick)
        except BenchmarkError as error:
            print(f"stragglers: {error}", file=sys.stderr)
            return 1
        figures |= found
        before, after, ideal, exact = found.values()
        print(f"{case.name:<10} {before:>14.2f} {after:>8.2f} {ideal:>8.2f}  {'exact' if exact else 'NOT exact'}")
    missed = [
        f"{name} is {figures[name]:.2f}, below {IDEAL_MIN:g}"
        for name in figures
        if name.startswith("of_ideal") and figures[name] < IDEAL_MIN
    ]
    missed += [f"{name}: the weights differ" for name in figures if name.startswith("exact") and not figures[name]]
    return conclude(args, figures, missed)


if __name__ == "__main__":
    sys.exit(main())
