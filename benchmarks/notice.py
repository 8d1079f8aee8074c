"""How soon after SIGTERM to all workers and the agent is a checkpoint of the current step committed?

    python benchmarks/notice.py [--check] [--json FILE]

About 100 MB of state, two workers on this host, a local directory. The bar is 2 s: spot instances warn shortly.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from holdfast.events import read_events

ROUNDS = 5
BAR_S = 2.0
ROOT = Path(__file__).parent.parent
TRAINING = ROOT / "tests" / "trainings" / "exactness_training.py"
SCRIPT = [str(TRAINING), "--steps", "100000", "--width", "24400", "--shards", "2"]
START_TIMEOUT_S = 120.0


def measure(home: Path) -> tuple[float, int]:
    """Seconds from the signal to the manifest, and the bytes that were saved."""
    place = home / "checkpoints"
    options = ["--dir", str(home), "--run", "r", "--workers", "2", "--checkpoint", str(place), "--save-every", "100000"]
    command = [sys.executable, "-m", "holdfast", "run", *options, *SCRIPT]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}  # the training has its gate from there
    agent = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=variables)
    try:
        events = home / "runs" / "r" / "events"
        deadline = time.monotonic() + START_TIMEOUT_S
        while not any(e["kind"] == "progress" and e["step"] >= 3 for e in read_events(events)):
            if time.monotonic() > deadline or agent.poll() is not None:
                raise SystemExit("the training does not get going")
            time.sleep(0.05)
        workers = [event["pid"] for event in read_events(events) if event["kind"] == "worker_started"]
        asked_at = time.monotonic()
        for pid in (*workers, agent.pid):
            os.kill(pid, signal.SIGTERM)
        while not list(place.glob("*/manifest.json")):
            if time.monotonic() - asked_at > 60:
                raise SystemExit("nothing was committed within 60 s")
            time.sleep(0.002)
        return time.monotonic() - asked_at, sum(file.stat().st_size for file in place.glob("*/part-*"))
    finally:
        agent.terminate()
        agent.wait(60)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help=f"exit 1 if the worst takes more than {BAR_S:g} s")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    took: list[float] = []
    size = 0
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as home:
            seconds, size = measure(Path(home))
            took.append(seconds)
    print(f"{size / 1e6:.0f} MB, {ROUNDS} times: median {statistics.median(took):.2f} s, worst {max(took):.2f} s")
    if options.json:
        figures = {"notice_median_s": statistics.median(took), "notice_worst_s": max(took), "notice_bytes": size}
        options.json.write_text(json.dumps(figures, indent=1))
    if options.check and max(took) > BAR_S:
        print(f"missed: committed {max(took):.2f} s after the notice, the bar is {BAR_S:g} s")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
