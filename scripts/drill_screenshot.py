"""The picture of a drill report in the README: a real drill of examples/digits.py, opened in Chromium.

    python scripts/drill_screenshot.py               # two minutes; writes docs/images/drill.png
    python scripts/drill_screenshot.py --report drill.html --to drill.png   # of a report that is there already

Needs playwright and Debian's chromium (PATH). Exit code 1 if a promise was broken; there is no picture then.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DRILL = ["--kill-every", "8s", "--stop", "1", "--ledger-down", "4s", "--for", "40s", "--seed", "1"]
SCRIPT = ["examples/digits.py", "--slow", "0.04", "--steps", "400"]
WIDTH = 1000
SHOWN = 5  # sections: up to the recovery times


def drill(report: Path) -> int:
    command = [sys.executable, "-m", "holdfast", "drill", *DRILL, "--report", str(report), "--", *SCRIPT]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def picture(report: Path, to: Path) -> None:
    sys.path.insert(0, str(ROOT))
    from tests.harness.browser import MISSING, browsing, chromium

    if chromium() is None:
        sys.exit(f"drill_screenshot: {MISSING}")
    with browsing() as browser:
        page = browser.new_page(viewport={"width": WIDTH, "height": 800}, color_scheme="light")
        page.goto(report.resolve().as_uri())
        plots = page.locator(".wide")
        last = plots.nth(min(SHOWN, plots.count()) - 2).bounding_box()
        assert last is not None
        clip = {"x": 0, "y": 0, "width": WIDTH, "height": last["y"] + last["height"] + 16}
        page.screenshot(path=to, full_page=True, clip=clip)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, help="of an earlier drill")
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "images" / "drill.png")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        report = args.report or Path(directory) / "drill.html"
        if args.report is None and (code := drill(report)):
            return code
        args.to.parent.mkdir(parents=True, exist_ok=True)
        picture(report, args.to)
    print(f"wrote {args.to}, {args.to.stat().st_size // 1024} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
