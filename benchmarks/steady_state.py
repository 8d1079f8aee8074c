"""Throughput and memory without failures: Holdfast against DistributedDataParallel on gloo, and torchft. With models
that are sharded over pairs of ranks, groups against HSDP on gloo (FSDP2 over a mesh of two dimensions).

    python benchmarks/steady_state.py                      # everything, about 8 minutes on 2 cores
    python benchmarks/steady_state.py --check --json f.json
    python benchmarks/steady_state.py --quick              # a smoke run: does it work at all?
    python benchmarks/steady_state.py --workloads 25m --workers 4 --systems ddp,shared_memory

The systems take turns, in a rotated order, and the medians of their rounds are compared, so that a change in the
machine's load falls on all of them. A run's samples/s is that of its slowest worker, over all measured steps.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from arguments import conclude, listed
from launching import BENCHMARKS, BenchmarkError, holdfast_command, last_lines, run_to_end
from workloads import WORKLOADS, Workload

BASELINE = "ddp"
HOLDFAST_PATHS = {"shared_memory": "shared-memory", "network": "network"}
HSDP, GROUPS = SHARDED = ("hsdp", "groups")  # for two groups of two ranks, or more
RANKS = 2
SYSTEMS = (BASELINE, *HOLDFAST_PATHS, "torchft", *SHARDED)
TITLES = {"ddp": "DDP", "shared_memory": "shared memory", "network": "network", "torchft": "torchft"}
TITLES |= {"hsdp": "HSDP", "groups": "groups"}
RATIO_MIN = {"shared_memory": 1.0, "network": 0.85, "groups": 1.0}
MEMORY_GRADIENTS_MAX = 2.0
# With smaller models the gradients drown in what the interpreter allocates by itself.
MEMORY_WORKLOADS = ("25m",)
RUN_TIMEOUT_S = 180.0


@dataclass(frozen=True)
class Outcome:
    """One run of one system."""

    samples_per_s: float
    step_s: float
    rss_increase_bytes: float
    need_increase_bytes: float


@dataclass
class Case:
    """One model with one number of workers, and what has been measured of it."""

    workload: Workload
    workers: int
    outcomes: dict[str, list[Outcome]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.workload.name}_{self.workers}"

    def median(self, system: str, figure: str) -> float:
        return statistics.median(getattr(outcome, figure) for outcome in self.outcomes[system])

    def is_for(self, system: str) -> bool:
        return system not in SHARDED or (self.workers >= 2 * RANKS and self.workers % RANKS == 0)

    def is_compared(self, system: str) -> bool:
        """Whether it and its baseline were measured, and are two."""
        return system in self.outcomes and system != baseline_of(system) and baseline_of(system) in self.outcomes

    def ratio(self, system: str) -> float:
        return self.median(system, "samples_per_s") / self.median(baseline_of(system), "samples_per_s")

    def extra_gradients(self, system: str) -> float:
        """Peak memory beyond the baseline's, shared pages divided among their workers, in gradients' sizes."""
        extra = self.median(system, "need_increase_bytes") - self.median(baseline_of(system), "need_increase_bytes")
        return extra / self.workload.gradient_bytes


def baseline_of(system: str) -> str:
    return HSDP if system in SHARDED else BASELINE


def main() -> int:
    args = parse_arguments()
    systems = list(args.systems)
    if "torchft" in systems and importlib.util.find_spec("torchft") is None:
        systems.remove("torchft")
        print("torchft: not installed", file=sys.stderr)
    cases = [Case(WORKLOADS[name], workers) for name in args.workloads for workers in args.workers]
    start = time.monotonic()
    try:
        for number in range(args.rounds):
            for case in cases:
                rotated = systems[number % len(systems) :] + systems[: number % len(systems)]
                for system in filter(case.is_for, rotated):
                    outcome = measure(case, system, quick=args.quick)
                    case.outcomes.setdefault(system, []).append(outcome)
                    progress(f"round {number + 1}/{args.rounds}", case, system, outcome, start)
    except BenchmarkError as error:
        print(f"steady_state: {error}", file=sys.stderr)
        return 1

    print_table(cases, systems)
    figures = flat_figures(cases)
    return conclude(args, figures, missed_bars(cases) if args.check else [])


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", type=listed(SYSTEMS), default=list(SYSTEMS))
    parser.add_argument("--workloads", type=listed(list(WORKLOADS)))
    parser.add_argument("--workers", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--quick", action="store_true", help="one round, few steps, small models")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, by name")
    args = parser.parse_args()
    args.workloads = args.workloads or (["10k", "1m"] if args.quick else list(WORKLOADS))
    args.workers = args.workers or ([2] if args.quick else [2, 4])
    args.rounds = args.rounds or (1 if args.quick else 3)
    return args


def measure(case: Case, system: str, *, quick: bool) -> Outcome:
    """Run one system once, in a directory of its own."""
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as directory:
        out = Path(directory)
        common = ["--workload", case.workload.name, "--workers", str(case.workers), "--out", str(out)]
        if quick:
            common += ["--warmup", "2", "--steps", str(min(20, case.workload.steps))]
        run_to_end(commands(case, system, out, common), out / "log", timeout_s=RUN_TIMEOUT_S)
        results = [json.loads(path.read_text()) for path in out.glob("*.json")]
        if len(results) != case.workers:
            left = f"{len(results)} of {case.workers} workers left figures"
            raise BenchmarkError(f"{system} {case.name}: {left}\n{last_lines(out / 'log')}")
    return Outcome(
        samples_per_s=min(result["samples_per_s"] for result in results),
        step_s=max(result["median_step_s"] for result in results),
        rss_increase_bytes=max(result["rss_increase_bytes"] for result in results),
        need_increase_bytes=statistics.fmean(result["need_increase_bytes"] for result in results),
    )


def commands(case: Case, system: str, out: Path, common: list[str]) -> list[list[str]]:
    if system in HOLDFAST_PATHS:
        options = ["--path", HOLDFAST_PATHS[system]]
        script = "holdfast_worker.py"
        command = holdfast_command(out, run="bench", workers=case.workers, script=script, options=options)
        return [command + common]
    if system == GROUPS:
        options, common = ["--ranks", str(RANKS), "--checkpoint", "none"], [*common, "--sharded"]
        groups = case.workers // RANKS
        command = holdfast_command(out, run="bench", workers=groups, script="holdfast_worker.py", options=options)
        return [command + common]
    script = str(BENCHMARKS / f"{system}_worker.py")
    rendezvous = ["--rendezvous", f"file://{out}/rendezvous"] if system in (BASELINE, HSDP) else []
    return [[sys.executable, script, "--rank", str(rank), *rendezvous, *common] for rank in range(case.workers)]


def progress(label: str, case: Case, system: str, outcome: Outcome, start: float) -> None:
    print(
        f"[{time.monotonic() - start:4.0f} s] {label} {case.workload.name} x{case.workers} {TITLES[system]}: "
        f"{outcome.samples_per_s:.0f} samples/s, step {outcome.step_s * 1e3:.2f} ms, "
        f"+{outcome.rss_increase_bytes / 1e6:.0f} MB",
        file=sys.stderr,
        flush=True,
    )


def print_table(cases: Sequence[Case], systems: Sequence[str]) -> None:
    print(" model workers         system  samples/s  step ms  ratio     MB   extra")
    for case in cases:
        for system in filter(case.outcomes.__contains__, systems):
            compared = case.is_compared(system)
            ratio = f"{case.ratio(system):.2f}" if compared else ""
            extra = f"{case.extra_gradients(system):+.1f} g" if compared else ""
            print(
                f"{case.workload.name:>6} {case.workers:>7} {TITLES[system]:>14} "
                f"{case.median(system, 'samples_per_s'):>10.0f} {case.median(system, 'step_s') * 1e3:>8.2f} "
                f"{ratio:>6} {case.median(system, 'rss_increase_bytes') / 1e6:>6.0f} {extra:>7}"
            )
    print("ratio: samples/s over DDP's, of groups over HSDP's.")
    print("MB: a worker's peak resident memory beyond what it had before the model.")
    print("extra: that beyond the other's, in units of the gradients' size (g), pages that workers share counted once.")


def flat_figures(cases: Sequence[Case]) -> dict[str, float]:
    figures: dict[str, float] = {}
    for case in cases:
        for system in case.outcomes:
            for figure in ("samples_per_s", "step_s", "rss_increase_bytes", "need_increase_bytes"):
                figures[f"{figure}_{system}_{case.name}"] = case.median(system, figure)
            if case.is_compared(system):
                figures[f"ratio_{system}_{case.name}"] = case.ratio(system)
                figures[f"extra_gradients_{system}_{case.name}"] = case.extra_gradients(system)
    return figures


def missed_bars(cases: Sequence[Case], ratio_min: Mapping[str, float] = RATIO_MIN) -> list[str]:
    missed = []
    for case in cases:
        for system, least in ratio_min.items():
            if not case.is_for(system):
                continue
            if not case.is_compared(system):
                missed.append(f"{system} {case.name}: not measured against {baseline_of(system)}")
                continue
            if case.ratio(system) < least:
                missed.append(f"ratio_{system}_{case.name} is {case.ratio(system):.3f}, below {least:.2f}")
            extra = case.extra_gradients(system)
            if case.workload.name in MEMORY_WORKLOADS and extra > MEMORY_GRADIENTS_MAX:
                missed.append(f"extra_gradients_{system}_{case.name} is {extra:.2f}, above {MEMORY_GRADIENTS_MAX:.0f}")
    return missed


if __name__ == "__main__":
    sys.exit(main())
