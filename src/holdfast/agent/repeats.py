"""Workers that end with the same exception at the same line of the script, again and again. Pure.

One worker's exception may be its host's; the same one at the same line, in one worker after the other, is the script's.
A leader that raises is followed by a leader that raises: the run gets on by a step each time, and costs a worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.core.words import incarnation_of

STEPS_MAX = 10  # from one to the next: more, and the run gets on in spite of it
NAMED_MAX = 3


@dataclass(frozen=True)
class _Failure:
    worker: str
    step: int
    reason: str
    place: str

    @property
    def cause(self) -> tuple[str, str]:
        """The message may name other files each time."""
        return self.place, self.reason.partition(":")[0]

    @property
    def round(self) -> tuple[int, int]:
        """Those who end in the same one may all have met the same outage."""
        return self.step, incarnation_of(self.worker)


@dataclass
class Repeats:
    """Owned by who asks: the agent's policy, and its reporter."""

    _row: list[_Failure] = field(default_factory=list)  # the same cause, one after the other
    _told: set[tuple[str, str]] = field(default_factory=set)

    def take(self, event: Mapping[str, Any]) -> str:
        """A worker's `failed` event. What to warn of, once for each line; or nothing."""
        step, place = event.get("step"), str(event.get("place") or "")
        if not place or not isinstance(step, int):
            return ""
        failure = _Failure(str(event["who"]), step, str(event.get("reason")), place)
        last = self._row[-1] if self._row else failure
        if failure.cause != last.cause or abs(step - last.step) > STEPS_MAX:
            self._row.clear()
        self._row.append(failure)
        if len(self._rounds()) < 2 or failure.cause in self._told:
            return ""
        self._told.add(failure.cause)
        return f"{self.sentence()}; the next worker there ends too, and under `if run.leader:` that is the next leader"

    def are(self, rounds: int) -> bool:
        """Whether it happened so often in a row."""
        return len(self._rounds()) >= rounds

    def sentence(self) -> str:
        """What happened; empty: nothing did."""
        if not self._row:
            return ""
        last = self._row[-1]
        workers = ", ".join(list(dict.fromkeys(failure.worker for failure in self._row))[-NAMED_MAX:])
        return f"the script raised the same exception at {last.place} in {workers}: {last.reason}"

    def _rounds(self) -> set[tuple[int, int]]:
        return {failure.round for failure in self._row}
