"""Going on with a run until it is over: what `holdfast events --follow` and `holdfast logs --follow` have in common."""

from __future__ import annotations

import select
import sys
import time
from collections.abc import Callable, Iterator

from holdfast.placement.directory import RunDirectory
from holdfast.placement.proc import find_workers

LOOK_S = 0.2
OVER_S = 1.0  # a run without agent and workers for so long is over


def while_it_lives(directory: RunDirectory) -> Iterator[None]:
    """A turn now and every LOOK_S, until the run has had neither agent nor workers for a moment, and one after that."""
    wait = _waiter()
    seen_alive = time.monotonic()
    while True:
        over = time.monotonic() - seen_alive > OVER_S
        yield
        if over:
            return
        if directory.agent() is not None or find_workers(directory.path):
            seen_alive = time.monotonic()
        wait(LOOK_S)


def _waiter() -> Callable[[float], None]:
    """Sleeps; BrokenPipeError when nobody reads any more, which a run that is quiet would not show."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError):
        return time.sleep

    def wait(seconds: float) -> None:
        if poll.poll(seconds * 1000):
            raise BrokenPipeError

    return wait
