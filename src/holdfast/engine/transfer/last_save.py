"""The end of a script waits for its last checkpoint: how long, what is told meanwhile, and why it was given up.

Only here is storage waited for. Belongs to the thread of the user's loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from holdfast.checkpoint.saving.saver import Doing, Saver
from holdfast.core.errors import StorageRefused
from holdfast.core.events import OTHERS_PARTS

AWAY_S = 60.0  # storage does not take it, and may soon; other workers' parts may still come
REFUSED_S = 5.0  # somebody must act
WRITING_S_MAX = 3600.0  # it is on its way, and nothing is wrong
TELL_AFTER_S = 1.0
LOOK_S = 0.2


def wait_for_last(
    saver: Saver,
    tell: Callable[[str], None],
    *,
    limit_s: float = WRITING_S_MAX,
    is_hurried: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
) -> str:
    """Until what was begun is committed, or somebody wants an end of it. Why it is not; empty: it is."""
    began = moved_at = clock()
    written, told = saver.written, ""
    saver.hurry()
    while not saver.settle(LOOK_S):
        now, trouble = clock(), saver.trouble
        if saver.is_idle:
            return trouble.message if trouble is not None else "the state could not be stored"
        if saver.written != written:
            written, moved_at = saver.written, now
        if trouble is not None:
            refused = isinstance(trouble, StorageRefused) and saver.doing is Doing.STUCK
            why, patience_s = trouble.message, REFUSED_S if refused else AWAY_S
        elif saver.doing is Doing.LOOKING:
            why, patience_s = OTHERS_PARTS, AWAY_S
        else:
            why, patience_s = "it is still being written", WRITING_S_MAX
        left_s = min(moved_at + patience_s, began + limit_s) - now
        if left_s <= 0 or is_hurried():
            return why
        if why != told and now - began >= TELL_AFTER_S and (trouble is not None or not told):
            told = why
            tell(f"it waits for storage to take the last checkpoint, of step {saver.begun}, for {left_s:.0f} s: {why}")
    return ""
