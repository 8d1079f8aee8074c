"""Does the dashboard's page stay quick with a million events and 256 workers?

    python benchmarks/dashboard.py [--events N] [--workers N] [--check] [--json FILE]

The log is made up: progress by the first member, with a worker that dies and is replaced every few thousand events, of
which every member tells. `holdfast dashboard` is started on it and the page opened in Chromium at once, while the
server still reads:

- first paint: from the start of the navigation to the browser's first contentful paint. The page then shows how much of
  the log is read.
- complete, cold: from the start of `holdfast dashboard` until all lanes and curves are drawn: what a user waits for.
- complete, warm: the same for a browser that comes when the log is read, from the start of its navigation.
- frames: while the lanes are scrolled and events arrive, 200 a second.
- memory: the script heap of the page and the resident memory of the server, before and after that.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import Page

from arguments import conclude
from holdfast.placement.directory import RunDirectory

sys.path.insert(0, str(Path(__file__).parents[1]))  # for what the tests have
from tests.harness.browser import browsing

FIRST_PAINT_S = 1.0
WARM_S = 2.0
COLD_S = 15.0
HEAP_BYTES = 64e6
SERVER_BYTES = 300e6
FRAME_S = 0.05  # 19 of 20 are shorter
LIVE_S = 8.0
LIVE_PER_S = 200
FRAMES = """async ms => {
  const lanes = document.getElementById('lanes'), times = [];
  let last = performance.now(), began = last, down = 9;
  while (last - began < ms) {
    const now = await new Promise(requestAnimationFrame);
    times.push(now - last);
    last = now;
    if (lanes.scrollTop + lanes.clientHeight >= lanes.scrollHeight - 10) down = -9;
    if (lanes.scrollTop <= 0) down = 9;
    lanes.scrollTop += down;
  }
  return times.slice(1).sort((a, b) => a - b);
}"""


class Log:
    """A made-up run: writes what its agent and workers would write."""

    def __init__(self, directory: Path, workers: int, seed: int) -> None:
        directory.mkdir(parents=True)
        self._directory = directory
        self._random = random.Random(seed)
        self._lines: dict[str, list[str]] = {}
        self._waiting = 0
        self.written = 0
        self.at = 1.7e9
        self.step = 0
        self.view = 1
        self.failures = 0
        self.members = [f"w{slot}.1" for slot in range(workers)]
        self._write("agent", "agent_started", f'"pid":1,"workers":{workers},"spares":0,"script":"train.py"')
        for worker in self.members:
            self._write("agent", "worker_started", f'"worker":"{worker}","pid":1')
            self._write(worker, "registered", '"address":"unix:/x"')
        self._tell_view("the run starts")

    def _write(self, who: str, kind: str, fields: str) -> None:
        self._lines.setdefault(who, []).append(f'{{"t":{self.at:.6f},"who":"{who}","kind":"{kind}",{fields}}}\n')
        self.written += 1
        self._waiting += 1
        if self._waiting >= 50_000:
            self.flush()

    def flush(self) -> None:
        for who, lines in self._lines.items():
            with (self._directory / f"{who}.jsonl").open("a") as file:
                file.writelines(lines)
        self._lines.clear()
        self._waiting = 0

    def _tell_view(self, reason: str) -> None:
        names = json.dumps(self.members, separators=(",", ":"))
        for worker in self.members:
            self._write(worker, "view", f'"view":{self.view},"members":{names},"reason":"{reason}","step":{self.step}')

    def progress(self) -> None:
        self.at += 0.25
        self.step += self._random.randrange(2, 5)
        loss = 2.0 / (1 + self.step / 50_000) + self._random.random() * 0.1
        rate = 9000 + self._random.random() * 800
        told = f'"metrics":{{"loss":{loss:.6f},"accuracy":{1 - loss / 3:.6f}}},"samples_per_s":{rate:.1f}'
        where = f'"view":{self.view},"step":{self.step},"steps":4000000'
        self._write(self.members[0], "progress", f'{where},{told},"workers":{len(self.members)}')
        if self.step % 997 == 0:
            size = '"uri":"s3://bucket/run","bytes":400000000,"duration_s":3.1,"held_s":0.02'
            self._write(self.members[1], "checkpoint", f'"step":{self.step},{size}')

    def failure(self) -> None:
        """One is killed, all others tell; it is replaced, all tell again."""
        self.failures += 1
        lost = self.members.pop(self._random.choice((0, self._random.randrange(len(self.members)))))
        slot, _, count = lost[1:].partition(".")
        for worker in self.members:
            where = f'"view":{self.view},"peer":"{lost}","reason":"connection closed","step":{self.step}'
            self._write(worker, "lost", where)
        self._write("agent", "worker_exited", f'"worker":"{lost}","pid":1,"signal":9,"reason":"killed"')
        replacement = f"w{slot}.{int(count) + 1}"
        self._write("agent", "worker_started", f'"worker":"{replacement}","pid":1')
        self.at += 0.2
        self.view += 1
        self._tell_view(f"{lost} is gone")
        for worker in self.members:
            self._write(worker, "recovered", f'"view":{self.view},"step":{self.step},"duration_s":0.21')
        for _ in range(12):
            self.progress()
        self._write(replacement, "registered", '"address":"unix:/x"')
        self.members.append(replacement)
        self.view += 1
        self._tell_view(f"{replacement} joined")
        self._write(replacement, "joined", f'"view":{self.view},"step":{self.step},"duration_s":0.8,"bytes":400000000')

    def fill(self, events: int) -> None:
        while self.written < events:
            self.progress()
            if self.written % 4000 < 2:
                self.failure()
        self.flush()


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def wait_for_story(page: Page) -> float:
    """The moment, by the page's clock, when everything was drawn."""
    while True:
        marks = page.evaluate("performance.getEntriesByName('story').map(mark => mark.startTime)")
        if marks:
            return float(marks[0]) / 1000
        page.wait_for_timeout(20)


def first_paint_s(page: Page) -> float:
    entries = page.evaluate("performance.getEntriesByName('first-contentful-paint').map(entry => entry.startTime)")
    return float(entries[0]) / 1000


def heap_bytes(page: Page) -> float:
    page.request_gc()
    return float(page.evaluate("performance.memory.usedJSHeapSize"))


def measure(home: Path, log: Log, screenshot: Path | None) -> dict[str, float]:
    command = [sys.executable, "-m", "holdfast", "dashboard", "--dir", str(home), "--port", "0", "large"]
    figures: dict[str, float] = {}
    with browsing("--enable-precise-memory-info") as browser:
        page = browser.new_page(viewport={"width": 1360, "height": 900})
        page.goto("about:blank")
        began = time.time()
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout is not None
            url = re.search(r"http://\S+", server.stdout.readline())
            assert url is not None
            figures["listening_s"] = time.time() - began
            page.goto(url[0])
            origin = float(page.evaluate("performance.timeOrigin")) / 1000
            figures["complete_cold_s"] = origin + wait_for_story(page) - began
            figures["first_paint_s"] = first_paint_s(page)
            page.reload()
            figures["complete_warm_s"] = wait_for_story(page)
            figures["first_paint_warm_s"] = first_paint_s(page)
            figures["picture_bytes"] = page.evaluate("fetch('/story.json').then(r => r.text()).then(t => t.length)")
            figures["server_bytes_before"] = resident_bytes(server.pid)
            figures["heap_bytes_before"] = heap_bytes(page)
            live(page, log, figures)
            figures["server_bytes"] = resident_bytes(server.pid)
            figures["heap_bytes"] = heap_bytes(page)
            if screenshot is not None:
                page.screenshot(path=screenshot)
        finally:
            server.terminate()
            server.wait(10)
    return figures


def live(page: Page, log: Log, figures: dict[str, float]) -> None:
    """Events arrive while the lanes are scrolled."""
    page.evaluate(f"ms => {{ window.frames_ = ({FRAMES})(ms); }}", LIVE_S * 1000)
    until = time.monotonic() + LIVE_S
    written = log.written
    while time.monotonic() < until:
        if log.written - written < LIVE_PER_S * (LIVE_S - (until - time.monotonic())):
            log.failure() if log.written % 5 == 0 else log.progress()
            log.flush()
        else:
            page.wait_for_timeout(5)
    times: list[float] = page.evaluate("window.frames_")
    figures["live_events_per_s"] = (log.written - written) / LIVE_S
    figures["frame_median_s"] = times[len(times) // 2] / 1000
    figures["frame_p95_s"] = times[int(len(times) * 0.95)] / 1000
    figures["frame_worst_s"] = times[-1] / 1000


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--events", type=int, default=1_000_000, metavar="N")
    parser.add_argument("--workers", type=int, default=256, metavar="N")
    parser.add_argument("--screenshot", type=Path, metavar="FILE")
    parser.add_argument("--check", action="store_true", help="exit 1 if a bar is missed")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="holdfast-dashboard-") as temporary:
        home = Path(temporary)
        directory = RunDirectory(home, "large", "")
        log = Log(directory.events, args.workers, seed=1)
        directory.write({"name": "large"})
        log.fill(args.events)
        size = sum(path.stat().st_size for path in directory.events.iterdir())
        print(f"{log.written:,} events of {args.workers} workers, {log.failures} failures, {size / 1e6:,.0f} MB of log")
        figures: dict[str, Any] = {"events": log.written, "log_bytes": size, **measure(home, log, args.screenshot)}
    for name, value in figures.items():
        print(f"{name:24} {value / 1e6:10.1f} MB" if "bytes" in name else f"{name:24} {value:10.3f}")
    bars = {
        "first_paint_s": FIRST_PAINT_S,
        "complete_warm_s": WARM_S,
        "complete_cold_s": COLD_S,
        "frame_p95_s": FRAME_S,
        "heap_bytes": HEAP_BYTES,
        "server_bytes": SERVER_BYTES,
    }
    missed = [f"{name} is {figures[name]:g}, the bar is {bar:g}" for name, bar in bars.items() if figures[name] > bar]
    return conclude(args, figures, missed)


if __name__ == "__main__":
    sys.exit(main())
