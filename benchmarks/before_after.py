"""Whether a change made anything slower: one benchmark in two checkouts, in turn.

    git worktree add ../before COMMIT
    python benchmarks/before_after.py --before ../before --rounds 5 -- \\
        steady_state.py --systems shared_memory,network --rounds 1 --workloads 10k,1m --workers 2
    python benchmarks/before_after.py --before ../before --check --worse-max 0.03 \\
        --figures 'samples_per_s_*' --higher -- steady_state.py …

The benchmark is called with --json in either checkout, each with its own sources on the path, in the order before,
after, after, before, and so on, so that the machine's moods fall on both. Each figure's medians are compared.
`noise` is half the distance of the quartiles before, as a share of the median: a smaller difference says nothing.
With --check, a figure that matches --figures and is worse by more than --worse-max is missed; it is said where
that is within the noise.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from arguments import conclude

HERE = Path(__file__).parents[1]
LIMIT_S = 1800.0


def main() -> int:
    args = parse_arguments()
    trees = {"before": args.before.resolve(), "after": HERE}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    for number in range(args.rounds):
        for name in reversed(trees) if number % 2 else trees:
            print(f"round {number + 1}/{args.rounds}, {name}", file=sys.stderr, flush=True)
            figures = run(trees[name], args.benchmark)
            if figures is None:
                return 1
            found[name].append(figures)
    rows = compare(found, args.figures, higher=args.higher)
    if not rows:
        print(f"before_after: no figure in both is named {args.figures}", file=sys.stderr)
        return 2
    print_table(rows)
    gone = sorted(matching(found["before"], args.figures) - rows.keys())
    flat = {f"{figure}_after_to_before": after / before for figure, (before, after, _, _) in rows.items() if before}
    bars = [*missed(rows, args.worse_max), *(f"{figure} is not measured any more" for figure in gone)]
    return conclude(args, flat, bars if args.check else [])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, metavar="DIR", help="a checkout to compare this one with")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--figures", default="*", metavar="PATTERN", help="compare only the figures with such names")
    parser.add_argument("--higher", action="store_true", help="higher is better (default: lower, as with times)")
    parser.add_argument("--worse-max", type=float, default=0.05, metavar="SHARE", help="with --check (default: 0.05)")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a figure is worse by more than that")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the ratios there, by name")
    parser.add_argument(
        "benchmark", nargs=argparse.REMAINDER, metavar="-- SCRIPT …", help="as in benchmarks/, with its arguments"
    )
    args = parser.parse_args()
    args.benchmark = [word for word in args.benchmark if word != "--"]
    if not args.benchmark:
        parser.error("name the benchmark after --, with its arguments: -- steady_state.py --rounds 1")
    for tree in (args.before, HERE):
        if not (tree / "benchmarks" / args.benchmark[0]).is_file():
            parser.error(f"{tree} has no benchmarks/{args.benchmark[0]}")
    return args


def run(tree: Path, benchmark: list[str]) -> dict[str, float] | None:
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as name:
        out = Path(name) / "figures.json"
        command = [sys.executable, str(tree / "benchmarks" / benchmark[0]), *benchmark[1:], "--json", str(out)]
        environment = os.environ | {"PYTHONPATH": f"{tree / 'src'}:{tree}"}
        ended = subprocess.run(command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S)
        failed = ended.returncode != 0 and "--check" not in benchmark  # with it, 1 only says that a bar was missed
        if failed or not out.exists():
            print(f"before_after: exit code {ended.returncode} in {tree}\n{ended.stdout}", file=sys.stderr)
            return None
        figures: dict[str, float] = json.loads(out.read_text())
    return figures


def compare(
    found: dict[str, list[dict[str, float]]], pattern: str, *, higher: bool
) -> dict[str, tuple[float, float, float, float]]:
    """Of each figure: the medians before and after, by what share it is worse, and the noise."""
    rows = {}
    for figure in matching(found["before"], pattern) & matching(found["after"], pattern):
        before, after = ([run[figure] for run in found[name]] for name in ("before", "after"))
        middle, now = statistics.median(before), statistics.median(after)
        ratio = now / middle if middle else 1.0 if now == 0 else math.inf
        worse = 1 - ratio if higher else ratio - 1
        spread = statistics.quantiles(before, n=4) if len(before) > 1 else [0.0, 0.0, 0.0]
        rows[figure] = (middle, now, worse, (spread[2] - spread[0]) / 2 / middle if middle else 0.0)
    return dict(sorted(rows.items()))


def matching(runs: list[dict[str, float]], pattern: str) -> set[str]:
    """What every run has measured."""
    return {figure for figure in runs[0] if fnmatch.fnmatch(figure, pattern) and all(figure in run for run in runs)}


def print_table(rows: dict[str, tuple[float, float, float, float]]) -> None:
    width = max((len(figure) for figure in rows), default=0)
    print(f"{'figure':<{width}}       before        after    worse    noise")
    for figure, (before, after, worse, noise) in rows.items():
        print(f"{figure:<{width}} {before:>12.5g} {after:>12.5g} {worse:>+8.1%} {noise:>8.1%}")


def missed(rows: dict[str, tuple[float, float, float, float]], worse_max: float) -> list[str]:
    return [
        f"{figure} is worse by {worse:.1%}, more than {worse_max:.0%}"
        + (" (within the noise)" if worse < noise else "")
        for figure, (_, _, worse, noise) in rows.items()
        if worse > worse_max
    ]


if __name__ == "__main__":
    sys.exit(main())
