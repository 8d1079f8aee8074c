"""A mean that another group gives to this one: every rank has its part of it, or none takes it.

The giving group may be lost while its ranks hand out their parts. If rank 0, whose machine commits the step, had its
part then and another rank had not, this group could neither go on nor go back. So rank 0 takes its own only when all
others have said that theirs are there; else none of them keeps what it has, and the machine hears that the giver is
lost: whoever is left computes the step again. Belongs to the thread of the user's loop.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from holdfast.engine.ranks.link import Link, Links
from holdfast.reduce.reduction import KeptMean

MEAN = "mean"  # from rank 0: look for it; to rank 0: whether it is there
SETTLED = "mean settled"
WAIT_S = 30.0  # the giver's ranks put their parts out when they come to it
AGAIN_S = 0.02
ANSWER_S = 90.0  # longer than a rank that is reading its part reads (recovery/catching.py)


def why_not_in_all(
    links: Links, step: int, giver: str, *, is_gone: Callable[[], bool], clock: Callable[[], float] = time.monotonic
) -> str:
    """In rank 0, which has its part: wait for the other ranks'. Empty: all have theirs, and the mean is taken."""
    deadline, why = clock() + WAIT_S, ""
    while not why:
        links.tell(MEAN, step, giver)
        lacking = [rank for rank, (there,) in enumerate(links.hear(MEAN, ANSWER_S), 1) if not there]
        if not lacking:
            break
        if is_gone():
            why = f"it was lost before rank {lacking[0]} here had its part of the mean of step {step}"
        elif clock() > deadline:
            why = f"rank {lacking[0]} here was not given its part of the mean of step {step} for {WAIT_S:.0f} s"
        else:
            time.sleep(AGAIN_S)
    links.tell(SETTLED, not why)
    return why


class Keeps(Protocol):
    """Where a rank keeps the mean of the last step."""

    kept: KeptMean | None


class PartOfMean:
    """In another rank. `fetch`: its part of a step's mean, from the giver's rank, into what it keeps; False: it is not
    there."""

    def __init__(self, link: Link, keeps: Keeps, fetch: Callable[[int, str], bool]) -> None:
        self._link = link
        self._keeps = keeps
        self._fetch = fetch
        self._asked = False
        self._there = False
        self._before: KeptMean | None = None

    def look(self, step: int, giver: str) -> None:
        if not self._asked:
            self._asked, self._there, self._before = True, False, self._keeps.kept
        self._there = self._there or self._fetch(step, giver)
        self._link.send(MEAN, self._there)

    def settle(self, taken: bool) -> None:
        if not taken:
            self._keeps.kept = self._before
        self._asked, self._before = False, None
