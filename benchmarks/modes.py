"""Loss over wall-clock time in each mode, with and without a worker that is 5 times slower; the accuracy at the end.

    python benchmarks/modes.py [--steps 400] [--check] [--json FILE] [--image FILE.svg]

Four workers; the asynchronous mode with three servers, or as many as `--servers` says. A shard takes 4 ms, or 20 ms on
the slow worker, in which the processor is free. Time counts from a run's first step. In the exact mode shards move from
the slow worker to the others, as they always do.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MODES = ("exact", "elastic", "async 0", "async 4", "async none")
COLOURS = ("#1b6ca8", "#2a9d5c", "#b8860b", "#c0392b", "#7d3c98")
POINT = 0.01  # of accuracy: the bar for staleness 4 with a slow worker
SMOOTH = 15  # steps
RUN_S_MAX = 240


def measure(mode: str, slow: float, steps: int, servers: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as home:
        notes = Path(home) / "notes"
        notes.mkdir()
        serving = ["--servers", str(servers)] if mode.startswith("async") else []
        script = str(Path(__file__).with_name("modes_worker.py"))
        words = ["--mode", mode, "--steps", str(steps), "--notes", str(notes), "--slow", str(slow)]
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


def smooth(curve: list[tuple[float, float]]) -> list[tuple[float, float]]:
    found = []
    for end in range(SMOOTH, len(curve) + 1, SMOOTH):
        part = curve[end - SMOOTH : end]
        found.append((round(part[-1][0], 3), round(sum(loss for _, loss in part) / SMOOTH, 5)))
    return found


def draw(results: list[dict[str, Any]]) -> str:
    """Two plots side by side, as an SVG: without and with a slow worker."""
    width, height, left, top = 420, 280, 55, 40
    longest = max(one["took_s"] for one in results) or 1.0
    highest = max(loss for one in results for _, loss in one["curve"]) or 1.0
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
            x, y = x0 + (width - 40) * tick / 5, top + height * (1 - tick / 5)
            parts.append(
                f'<text x="{x:.0f}" y="{top + height + 16}" text-anchor="middle">{longest * tick / 5:.0f}</text>'
            )
            if not place:
                parts.append(f'<text x="{x0 - 6}" y="{y + 4:.0f}" text-anchor="end">{highest * tick / 5:.1f}</text>')
        for one in [one for one in results if one["slow"] == slow]:
            colour = COLOURS[MODES.index(one["mode"])]
            points = " ".join(
                f"{x0 + (width - 40) * t / longest:.1f},{top + height * (1 - loss / highest):.1f}"
                for t, loss in one["curve"]
            )
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
    for number, mode in enumerate(MODES):
        x = left + number * 150
        parts.append(f'<rect x="{x}" y="{top + height + 36}" width="14" height="4" fill="{COLOURS[number]}"/>')
        parts.append(f'<text x="{x + 20}" y="{top + height + 42}">{mode}</text>')
    parts.append(
        f'<text x="{left}" y="{top + height + 58}">seconds from the first step; loss of the steps, smoothed</text>'
    )
    return "\n".join([*parts, "</svg>"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--slow", type=float, default=5.0)
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--image", type=Path)
    parser.add_argument("--check", action="store_true", help="exit 1 if a bar is missed, and name it")
    options = parser.parse_args()
    results = []
    print(f"{'mode':12} {'slow worker':>12} {'seconds':>8} {'accuracy':>9}", flush=True)
    for slow in (1.0, options.slow):
        for mode in options.modes.split(","):
            found = measure(mode, slow, options.steps, options.servers)
            results.append(found)
            print(f"{mode:12} {slow:11g}x {found['took_s']:8.1f} {found['accuracy']:9.4f}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results))
    if options.image:
        options.image.write_text(draw(results))
    return check(results) if options.check else 0


def check(results: list[dict[str, Any]]) -> int:
    slow = {one["mode"]: one for one in results if one["slow"] > 1}
    equal = {one["mode"]: one for one in results if one["slow"] == 1}
    bars = {
        "async 4 with a slow worker is within a point of the exact mode's accuracy": (
            slow["async 4"]["accuracy"] >= equal["exact"]["accuracy"] - POINT
        ),
        "async 4 with a slow worker takes less time than the exact mode": (
            slow["async 4"]["took_s"] < slow["exact"]["took_s"]
        ),
        "async none with a slow worker takes less time than async 0": (
            slow["async none"]["took_s"] < slow["async 0"]["took_s"]
        ),
    }
    for bar, held in bars.items():
        print(f"{'held' if held else 'MISSED'}: {bar}")
    return 0 if all(bars.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
