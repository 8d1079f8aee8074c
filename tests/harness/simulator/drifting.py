"""States that go apart: a script that keeps something outside the state, or a bit that flips in one worker's.

`drifts` of a schedule is "script" (whoever joins after the first step has another state from its next update on) or
"flip" (one worker of the first view has another from a step on). Nothing is due to be compared in so short a run: only
somebody who joins can notice.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from holdfast.membership.auditing import AuditRules, Finding
from holdfast.membership.suspecting import PARAMETER, TENSOR, Details, StateEntry
from tests.harness.simulator.schedule import Schedule, Violation

if TYPE_CHECKING:
    from tests.harness.simulator.worker import Worker

SELDOM = 10_000  # steps
SCRIPT, FLIP = "script", "flip"
RIGHT = "right"


def rules_of(schedule: Schedule) -> AuditRules:
    return AuditRules(fraction=1.0 if schedule.audit else 0.0, every=SELDOM if schedule.drifts else 0)


class Drift:
    """Of one process: what its state really is, beside what is the same everywhere."""

    def __init__(self, schedule: Schedule, worker: Worker) -> None:
        self._drifts = schedule.drifts
        self._worker = worker
        rng = random.Random(f"drift {schedule.seed}")
        self._flips = worker.id == f"w{rng.randrange(schedule.workers)}.1"
        self._flips_at = rng.randrange(1, max(2, schedule.steps // 2))
        self._joined = False
        self._narrow = -1
        self.doubts = 0  # how often it was offered states that differ
        self.value = RIGHT

    def fetched(self, sources: list[Worker], step: int) -> bool:
        """Whether they offer the same. If so, it is this worker's."""
        if len({source.drift.value for source in sources[:2]}) > 1:
            self.doubts += 1
            return False
        self.value, self._joined = sources[0].drift.value, step > 0
        return True

    def applied(self, step: int) -> None:
        if self._drifts == SCRIPT and self._joined:
            self.value = f"{self._worker.id}'s own"
        if self._drifts == FLIP and self._flips and step >= self._flips_at and self.value == RIGHT:
            self.value = "flipped"

    def narrow(self, step: int) -> None:
        self._narrow = step

    def said(self, step: int) -> tuple[str, Details | None]:
        """The digest of all of it, if somebody doubts; and its entries, once digests have shown that they differ."""
        if self._worker.machine.audits.doubted != step:
            return "", None
        many = 1 if self._drifts == FLIP else 4
        entries = [
            StateEntry(f"the parameter {number}", PARAMETER, TENSOR, f"(3,) {self.value if number < many else RIGHT}")
            for number in range(4)
        ]
        return self.value, Details(tuple(entries)) if step == self._narrow else None

    def check_blamed(self, finding: Finding) -> None:
        """Unless those who joined had no other source, and so more have the wrong state than the right one."""
        if finding.script and self._drifts != SCRIPT:
            raise Violation(f"the script is blamed for a bit that flipped: {finding}")
        said = [digest for _, digest in finding.digests]
        right = [liar for liar in finding.liars if dict(finding.digests)[liar] == RIGHT]
        if right and said.count(RIGHT) >= len(said) - said.count(RIGHT):
            raise Violation(f"{right} are accused, and have the right state: {finding}")
