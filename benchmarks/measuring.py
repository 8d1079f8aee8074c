"""What one worker measures of itself, in the same way for every system: step times and memory.

A worker calls `memory_before_model()`, then `step_done()` after each step, and at the end leaves its `figures()`
in `PID.json` for the harness.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from itertools import pairwise
from pathlib import Path


class Measurement:
    """Times of the steps after the warm-up, and the peak of resident memory since `memory_before_model`."""

    def __init__(self, *, warmup: int, batch: int) -> None:
        self._warmup = warmup
        self._batch = batch
        self._ends: list[float] = []
        self._rss_before = 0

    def memory_before_model(self) -> None:
        """Also forgets the peak so far: importing torch and making the data are not the system's doing."""
        Path("/proc/self/clear_refs").write_text("5")
        self._rss_before = _memory("status", "VmRSS")

    def step_done(self) -> None:
        self._ends.append(time.perf_counter())

    def figures(self) -> dict[str, float]:
        ends = self._ends[self._warmup - 1 :]
        steps = [end - start for start, end in pairwise(ends)]
        rss_peak = _memory("status", "VmHWM")
        shared = _memory("smaps_rollup", "Rss") - _memory("smaps_rollup", "Pss")
        return {
            "steps": len(steps),
            "median_step_s": statistics.median(steps),
            "mean_step_s": statistics.fmean(steps),
            "samples_per_s": self._batch * len(steps) / (ends[-1] - ends[0]),
            "rss_before_bytes": self._rss_before,
            "rss_peak_bytes": rss_peak,
            "rss_increase_bytes": rss_peak - self._rss_before,
            # Resident memory counts a page that four workers share four times. This counts it once over all of them.
            "need_increase_bytes": rss_peak - self._rss_before - shared,
        }


def write(directory: Path, figures: dict[str, float]) -> None:
    path = directory / f"{os.getpid()}.json"
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(figures))
    unfinished.replace(path)


def _memory(file: str, field: str) -> int:
    for line in Path("/proc/self", file).read_text().splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise AssertionError(f"no {field} in /proc/self/{file}")
