"""The agent's eye on a run that waits for itself: judged at every look of the heartbeat watch, in its thread.

What is decided is in detection/standstill.py. Here are the stacks of those that wait, and the words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.agent.workers.stacks import STACKS_BYTES_MAX, collect
from holdfast.detection.beat import Beat
from holdfast.detection.neighbours import Row
from holdfast.detection.pages import Page
from holdfast.detection.standstill import Idle, Standstill, StandstillJudge

STACKS_OF_MAX = 8  # workers whose stacks are collected: each takes a moment


@dataclass(frozen=True)
class FoundHung:
    """A worker hangs, or is in the way of a run that stands still. `fields` are those of the event."""

    worker: str
    fields: Mapping[str, Any]
    kill: bool  # it is to be ended
    kind: str = "hung"  # of the event
    hopeless: str = ""  # why the run must end


class StandingStill:
    """Belongs to the heartbeat watch's thread, but for `idle`, which is replaced and never changed."""

    def __init__(self, host: str, report: Callable[[FoundHung], None], *, may_end: bool) -> None:
        self._judge = StandstillJudge(host, may_end)
        self._report = report
        self.idle: Idle | None = None  # what this host says of its members
        self.elsewhere: Callable[[], Sequence[Row]] = lambda: ()

    def ended(self, worker: str) -> None:
        self._judge.ended(worker)

    def look(
        self,
        beats: Mapping[str, Beat],
        pages: Mapping[str, Page],
        members: Sequence[str],
        late: Sequence[str],
        *,
        ledger_away: bool,
        now: float,
    ) -> None:
        judge = self._judge
        judge.observe(beats, now)
        self.idle = None if ledger_away else judge.idle(beats, members)
        if ledger_away:
            judge.ledger_is_away()
            return  # nothing could be changed, and much of what is waited for comes with it
        elsewhere = {row.host: (row.age_s, row.crew.idle) for row in self.elsewhere()}
        found = judge.judge(beats, members, elsewhere, now)
        for one in [*([found] if found is not None else []), *judge.strays(beats, late)]:
            self._tell(one, beats, pages)

    def _tell(self, found: Standstill, beats: Mapping[str, Beat], pages: Mapping[str, Page]) -> None:
        stacks = [
            f"{worker}, {wait.words}:\n{collect(pages[worker].note, thread=beats[worker].thread)}"
            for worker, wait in list(found.waits.items())[:STACKS_OF_MAX]
            if worker in pages
        ]
        share = STACKS_BYTES_MAX // max(1, len(stacks))
        fields = {
            "step": found.step,
            "seconds": found.seconds,
            "waits": {worker: wait.words for worker, wait in found.waits.items()},
            "reason": found.reason + (f"; {found.hopeless}" if found.hopeless else ""),
            "killed": bool(found.ended),
            "stacks": "\n".join(text[:share] for text in stacks),
        }
        hopeless = f"the run waits for itself, and {found.hopeless}" if found.hopeless else ""
        self._report(FoundHung(found.blamed, fields, bool(found.ended), "standstill", hopeless))
