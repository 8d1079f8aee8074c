"""What event logging costs, the account of time included, as a share of the step time on 4 workers.

    python benchmarks/event_cost.py                        # about a minute
    python benchmarks/event_cost.py --check --json f.json

Every worker counts the processor time, the kernel's included, that its training thread spends in `EventLog.write` and
in keeping its account (`Spending`), over all steps after a warm-up; what it takes to read that clock is measured each
time and left out. Wall time would not do: four workers on two processors lose theirs now and then in the middle of
anything. The share is that time over the time the steps took, of the worker for which it is largest. The bar is for the
model with a million parameters; with ten thousand a step is so short that nobody would use four workers.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

from arguments import conclude, listed
from launching import BenchmarkError, holdfast_command, run_to_end

WORKERS = 4
WORKLOADS = ("10k", "1m")
BARRED = ("1m",)
SHARE_MAX = 0.005  # the bar
TIMEOUT_S = 180.0


def measure(workload: str, seconds: float) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as name:
        home = Path(name)
        out = home / "out"
        out.mkdir()
        command = holdfast_command(
            home, run="bench", workers=WORKERS, script="event_cost_worker.py", options=["--checkpoint", "none"]
        )
        arguments = ["--workload", workload, "--seconds", str(seconds), "--out", str(out)]
        run_to_end([[*command, *arguments]], home / "log", timeout_s=TIMEOUT_S)
        found = [json.loads(path.read_text()) for path in out.glob("*.json")]
        events = home / "runs" / "bench" / "events"
        written = sum(path.stat().st_size for path in events.iterdir())
    if len(found) != WORKERS:
        raise BenchmarkError(f"{len(found)} workers ended")
    worst = max(found, key=lambda one: (one["events_s"] + one["account_s"]) / one["step_s"])
    return {
        f"step_ms_{workload}": worst["step_s"] * 1000,
        f"events_us_{workload}": worst["events_s"] * 1e6,
        f"account_us_{workload}": worst["account_s"] * 1e6,
        f"calls_{workload}": worst["calls"],
        f"share_{workload}": (worst["events_s"] + worst["account_s"]) / worst["step_s"],
        f"events_bytes_{workload}": written,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", type=listed(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--seconds", type=float, default=15.0, help="of training, after the warm-up")
    parser.add_argument("--check", action="store_true", help="exit with 1 if the bar is missed")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there, by name")
    args = parser.parse_args()
    figures: dict[str, float] = {}
    print(f"{'parameters':<10} {'step':>9} {'events':>9} {'account':>9} {'calls':>6} {'share':>8} {'written':>9}")
    for workload in args.workloads:
        try:
            found = measure(workload, args.seconds)
        except BenchmarkError as error:
            print(f"event_cost: {error}", file=sys.stderr)
            return 1
        figures |= found
        step_ms, events_us, account_us, calls, share, written = found.values()
        row = f"{workload:<10} {step_ms:>6.2f} ms {events_us:>6.1f} us {account_us:>6.1f} us {calls:>6.1f}"
        print(f"{row} {share:>8.3%} {written / 1e3:>6.0f} KB")
    missed = [
        f"share_{workload} is {figures[f'share_{workload}']:.3%}, not below {SHARE_MAX:.1%}"
        for workload in BARRED
        if f"share_{workload}" in figures and figures[f"share_{workload}"] >= SHARE_MAX
    ]
    return conclude(args, figures, missed)


if __name__ == "__main__":
    sys.exit(main())
