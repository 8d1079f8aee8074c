"""What a rank of a group holds: of parameters, gradients and optimizer state, and at its peak, by the group's size.

python benchmarks/group_memory.py            # 25 M parameters, groups of 1, 2 and 4; about a minute on 2 cores
python benchmarks/group_memory.py --check
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from arguments import conclude
from launching import BenchmarkError, holdfast_command, run_to_end
from workloads import WORKLOADS

HELD_MAX = 0.6  # by a rank of two, of what one process holds
TIMEOUT_S = 300.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", choices=WORKLOADS, default="25m")
    parser.add_argument("--ranks", type=lambda text: [int(one) for one in text.split(",")], default=[1, 2, 4])
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, by name")
    args = parser.parse_args()
    figures: dict[str, float] = {}
    for ranks in args.ranks:
        try:
            held, peak = measure(args.workload, ranks)
        except BenchmarkError as error:
            print(f"group_memory: {error}", file=sys.stderr)
            return 1
        figures |= {f"held_bytes_{ranks}": held, f"rss_increase_bytes_{ranks}": peak}
        of_one = held / figures.get("held_bytes_1", held)
        print(f"{ranks} ranks: each holds {held / 1e6:.1f} MB, {of_one:.2f} of one's; peak {peak / 1e6:.0f} MB more")
    missed = []
    if "held_bytes_2" in figures and "held_bytes_1" in figures:
        figures["held_of_one"] = figures["held_bytes_2"] / figures["held_bytes_1"]
        if figures["held_of_one"] > HELD_MAX:
            missed.append(
                f"a rank of two holds {figures['held_of_one']:.2f} of what one process does, above {HELD_MAX}"
            )
    return conclude(args, figures, missed if args.check else [])


def measure(workload: str, ranks: int) -> tuple[float, float]:
    """The most that a rank holds, and the most by which its resident memory has grown."""
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as directory:
        out = Path(directory)
        words = [
            "--workload",
            workload,
            "--workers",
            "4",
            "--out",
            str(out),
            "--warmup",
            "1",
            "--steps",
            "2",
            "--sharded",
        ]
        options = ["--ranks", str(ranks), "--checkpoint", "none"]
        command = holdfast_command(out, run="bench", workers=1, script="holdfast_worker.py", options=options)
        run_to_end([command + words], out / "log", timeout_s=TIMEOUT_S)
        results = [json.loads(path.read_text()) for path in out.glob("*.json")]
    return max(one["held_bytes"] for one in results), max(one["rss_increase_bytes"] for one in results)


if __name__ == "__main__":
    sys.exit(main())
