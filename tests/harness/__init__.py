"""What tests, soaks, benchmarks and screenshots share, and no user needs: servers, a browser, gates, the simulator."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]


def let_children_find_tests() -> None:
    """Scripts that this process starts, and those that they start, can import `tests` wherever they are."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(ROOT) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, paths)])
