"""Waiting for a condition, with a deadline that a busy machine keeps."""

from __future__ import annotations

import time
from collections.abc import Callable

DEADLINE_S = 600.0


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {DEADLINE_S:g} s until {what}"
        time.sleep(0.02)
