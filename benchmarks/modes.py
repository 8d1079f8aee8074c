"""Loss over wall-clock time in each mode, with and without a worker that is 5 times slower; the accuracy at the end.

    python benchmarks/modes.py [--steps 264] [--rounds 3] [--check] [--json FILE] [--image FILE.svg]

The demo's model and schedule, its 12 epochs. Four workers; the asynchronous mode with three servers, or as many as
`--servers` says. A shard takes 20 ms, or 100 ms on the slow worker, in which the processor is free. Time counts from a
run's first step. In the exact mode shards move from the slow worker to the others, as they always do; "exact even" is
the same with `--rebalance off`, where every worker keeps as many shards. "async 4 twice" makes twice as many steps:
gradients that are a few updates old are worth less. With several rounds, each of which has every run once, the figures
are medians.

Bars of --check, with the slow worker: "async 4 twice" has the accuracy of "exact" within a point, in less time than
"exact even" takes.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

EVEN = "exact even"  # without rebalancing
TWICE = "async 4 twice"  # as many steps
MODES = ("exact", EVEN, "elastic", "async 0", "async 4", "async none", TWICE)
COLOURS = ("#1b6ca8", "#6fb1e0", "#2a9d5c", "#b8860b", "#c0392b", "#7d3c98", "#e08e79")
POINT = 0.01  # of accuracy: the bar for staleness 4 with a slow worker
SMOOTH = 15  # steps
LOSS_MIN = 1e-4  # what is below is drawn there
RUN_S_MAX = 400


def measure(mode: str, slow: float, steps: int, servers: int, compress: str = "") -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as home:
        notes = Path(home) / "notes"
        notes.mkdir()
        serving = ["--servers", str(servers)] if mode.startswith("async") else []
        serving += ["--rebalance", "off"] if mode == EVEN else []
        script = str(Path(__file__).with_name("modes_worker.py"))
        asked, steps = (mode.removesuffix(" twice"), 2 * steps) if mode == TWICE else (mode, steps)
        words = ["--mode", asked.removesuffix(" even"), "--steps", str(steps), "--slow", str(slow)]
        words += ["--notes", str(notes), "--compress", compress]
        command = [sys.executable, "-m", "holdfast", "run", "--run", "b", "--dir", home, "--workers", "4", *serving]
        done = subprocess.run(
            [*command, "--checkpoint", "none", script, *words], capture_output=True, text=True, timeout=RUN_S_MAX
        )
        if done.returncode:
            raise SystemExit(f"{mode}, {slow:g} times: exit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr}")
        lines = [json.loads(line) for path in notes.glob("*.jsonl") for line in path.read_text().splitlines()]
        accuracy = float((notes / "accuracy").read_text())
    lines.sort(key=lambda line: line["t"])
    began = lines[0]["t"]
    curve = [(line["t"] - began, line["loss"]) for line in lines]
    return {"mode": mode, "slow": slow, "took_s": round(curve[-1][0], 2), "accuracy": accuracy, "curve": smooth(curve)}


def median_of(found: list[dict[str, Any]]) -> dict[str, Any]:
    """The run with the median time, with the median accuracy, and all times."""
    ordered = sorted(found, key=lambda one: one["took_s"])
    accuracy = sorted(one["accuracy"] for one in found)[len(found) // 2]
    return {**ordered[len(found) // 2], "accuracy": accuracy, "times_s": [one["took_s"] for one in ordered]}


def smooth(curve: list[tuple[float, float]]) -> list[tuple[float, float]]:
    found = []
    for end in range(SMOOTH, len(curve) + 1, SMOOTH):
        part = curve[end - SMOOTH : end]
        found.append((round(part[-1][0], 3), round(sum(loss for _, loss in part) / SMOOTH, 5)))
    return found


def draw(results: list[dict[str, Any]]) -> str:
    """Two plots side by side, as an SVG: without and with a slow worker. The loss is on a logarithmic scale."""
    width, height, left, top = 420, 280, 55, 40
    longest = max(one["took_s"] for one in results) or 1.0
    losses = [max(loss, LOSS_MIN) for one in results for _, loss in one["curve"]]
    low, high = math.floor(math.log10(min(losses))), math.ceil(math.log10(max(losses)))

    def at(loss: float) -> float:
        return top + height * (1 - (math.log10(max(loss, LOSS_MIN)) - low) / max(1, high - low))

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * (width + 30) + 40}" height="{height + 100}" '
        'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
    ]
    for place, slow in enumerate(sorted({one["slow"] for one in results})):
        x0 = left + place * (width + 30)
        title = "four equal workers" if slow == 1 else f"one worker {slow:g} times slower"
        parts.append(f'<text x="{x0}" y="{top - 15}" font-weight="bold">{title}</text>')
        parts.append(f'<path d="M{x0} {top}V{top + height}H{x0 + width - 40}" stroke="#444" fill="none"/>')
        for tick in range(6):
            x = x0 + (width - 40) * tick / 5
            parts.append(
                f'<text x="{x:.0f}" y="{top + height + 16}" text-anchor="middle">{longest * tick / 5:.0f}</text>'
            )
        for power in range(low, high + 1) if not place else ():
            parts.append(f'<text x="{x0 - 6}" y="{at(10.0**power) + 4:.0f}" text-anchor="end">{10.0**power:g}</text>')
        for one in [one for one in results if one["slow"] == slow]:
            colour = COLOURS[MODES.index(one["mode"])]
            points = " ".join(f"{x0 + (width - 40) * t / longest:.1f},{at(loss):.1f}" for t, loss in one["curve"])
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
    for number, mode in enumerate(MODES):
        x = left + number * 118
        parts.append(f'<rect x="{x}" y="{top + height + 36}" width="14" height="4" fill="{COLOURS[number]}"/>')
        parts.append(f'<text x="{x + 20}" y="{top + height + 42}">{mode}</text>')
    parts.append(
        f'<text x="{left}" y="{top + height + 58}">seconds from the first step; loss of the steps, smoothed</text>'
    )
    return "\n".join([*parts, "</svg>"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=264)
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--slow", type=float, default=5.0)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--image", type=Path)
    parser.add_argument("--check", action="store_true", help="exit 1 if a bar is missed, and name it")
    options = parser.parse_args()
    runs = [(mode, slow) for slow in (1.0, options.slow) for mode in options.modes.split(",")]
    all_of: dict[tuple[str, float], list[dict[str, Any]]] = {run: [] for run in runs}
    print(f"{'mode':14} {'slow worker':>12} {'seconds':>8} {'accuracy':>9}", flush=True)
    for _ in range(options.rounds):
        for mode, slow in runs:
            found = measure(mode, slow, options.steps, options.servers)
            all_of[mode, slow].append(found)
            print(f"{mode:14} {slow:11g}x {found['took_s']:8.1f} {found['accuracy']:9.4f}", flush=True)
    results = [median_of(found) for found in all_of.values()]
    if options.rounds > 1:
        print(f"medians of {options.rounds} rounds, and the range of times")
        for one in results:
            times = f"{one['times_s'][0]:.1f} to {one['times_s'][-1]:.1f}"
            print(f"{one['mode']:14} {one['slow']:11g}x {one['took_s']:8.1f} {one['accuracy']:9.4f}   {times}")
    if options.json:
        options.json.write_text(json.dumps(results))
    if options.image:
        options.image.write_text(draw(results))
    return check(results) if options.check else 0


def check(results: list[dict[str, Any]]) -> int:
    """The bars are those with a slow worker: staleness 4 against the exact mode that leaves it its shards."""
    slow = {one["mode"]: one for one in results if one["slow"] > 1}
    missing = [mode for mode in ("exact", EVEN, TWICE) if mode not in slow]
    if missing:
        raise SystemExit(f"--check needs the modes {', '.join(missing)}, too")
    served, exact, even = slow[TWICE], slow["exact"], slow[EVEN]
    bars = {
        f"accuracy of {TWICE} ({served['accuracy']:.4f}) within a point of exact's ({exact['accuracy']:.4f})": (
            served["accuracy"] >= exact["accuracy"] - POINT
        ),
        f"{TWICE} ({served['took_s']:.1f} s) takes less time than exact even ({even['took_s']:.1f} s)": (
            served["took_s"] < even["took_s"]
        ),
    }
    print("with a slow worker:")
    for bar, held in bars.items():
        print(f"  {'held' if held else 'MISSED'}: {bar}")
    for mode in [mode for mode in ("async 4", TWICE) if mode in slow]:
        print(f"  no bar: {mode} took {slow[mode]['took_s'] / exact['took_s']:.2f} of the time of exact")
    return 0 if all(bars.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
