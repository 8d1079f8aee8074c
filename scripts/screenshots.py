"""Makes the pictures of the README from a real run: three workers and a spare, one of which is killed on the way.

    python scripts/screenshots.py [--to DIR]          # docs/images/dashboard.png

Needs chromium and playwright (`make install`). Runs in a temporary directory and leaves nothing else behind.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Page

from holdfast.dashboard.server import Dashboard
from holdfast.testing.observed_run import ObservedRun

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # for what the tests have
from tests.harness.browser import MISSING, browsing, chromium  # noqa: E402

SCRIPT = [
    str(ROOT / "examples" / "digits.py"),
    "--batch-size",
    "80",
    "--shards",
    "10",
    "--epochs",
    "25",
    "--slow",
    "0.02",
]
OPTIONS = ["--workers", "3", "--spares", "1", "--save-every", "60"]
STEPS = 25 * 17
KILLS = (0.3, 0.6)  # at these parts of the training
SIZE = {"width": 1180, "height": 980}


def take(page: Page, run: ObservedRun, target: Path) -> None:
    """Train, kill, and shoot shortly before the end."""
    for part in KILLS:
        run.wait(lambda part=part: run.step >= part * STEPS and len(run.living_registered()) == 4, f"{part:.0%}")  # type: ignore[misc]
        victim = run.members[-1]
        os.kill(run.pids[victim], signal.SIGKILL)
        run.wait(lambda victim=victim: victim not in run.members and len(run.members) == 3, "the spare")  # type: ignore[misc]
    run.wait(lambda: run.step >= 0.9 * STEPS, "most of the training")
    page.reload()
    page.wait_for_selector(".lanes path.s-computing")
    page.wait_for_timeout(1500)  # the facts of this host come once a second
    page.screenshot(path=target)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "images", metavar="DIR")
    args = parser.parse_args()
    args.to.mkdir(parents=True, exist_ok=True)
    if chromium() is None:
        print(f"screenshots: {MISSING}")
        return 2
    with tempfile.TemporaryDirectory(prefix="holdfast-screenshots-") as home, browsing() as browser:
        run = ObservedRun(Path(home), "digits", OPTIONS, SCRIPT)
        run.start()
        dashboard = None
        try:
            run.wait(lambda: run.step > 0, "the first step")
            dashboard = Dashboard(run.directory, 0)
            page = browser.new_page(viewport=SIZE)
            page.goto(dashboard.url)
            take(page, run, args.to / "dashboard.png")
        finally:
            run.end()
            if dashboard is not None:
                dashboard.close()
    print(args.to / "dashboard.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
