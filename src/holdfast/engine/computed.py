"""What a worker tells its machine when it is through with its shards: that they are there, and all that goes with it.

It is told when what they leave is where others may read it, which takes a while where that is on a device. Belongs to
the thread of the user's loop. Owns the worker's pace.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import SupportsFloat

from holdfast.engine.gradients import Gradients
from holdfast.engine.recovery.auditing import Audits
from holdfast.engine.transfer.checkpointing import NoCheckpoints
from holdfast.membership import messages as m
from holdfast.membership.balance import Pace
from holdfast.membership.machine import Machine

POLL_S = 0.001  # a device is asked so often whether it has copied the sums


class ComputedShares:
    def __init__(
        self,
        machine: Machine,
        gradients: Gradients,
        audits: Audits,
        checkpoints: NoCheckpoints,
        tell: Callable[[m.Event], None],
    ) -> None:
        self._machine = machine
        self._gradients = gradients
        self._audits = audits
        self._checkpoints = checkpoints
        self._tell = tell
        self._pace = Pace()
        self._unsaid: Callable[[], None] | None = None

    def computed(self, step: int, durations_s: Sequence[SupportsFloat], over: str) -> None:
        """Begin to bring what the shards of this step have left."""
        self._gradients.bring()
        self._unsaid = lambda: self._say(step, durations_s, over)
        self.look()

    def look(self) -> None:
        """Tell the machine, if all is there now."""
        if self._unsaid is not None and self._gradients.is_brought():
            say, self._unsaid = self._unsaid, None
            say()

    def patience_s(self, at_most_s: float) -> float:
        """How long the worker may wait for other things."""
        return at_most_s if self._unsaid is None else min(at_most_s, POLL_S)

    def forget(self) -> None:
        """Other shards are computed first."""
        self._unsaid = None

    def note_pace(self, durations_s: Sequence[float]) -> None:
        self._pace.took(durations_s)

    def _say(self, step: int, durations_s: Sequence[SupportsFloat], over: str) -> None:
        view = self._machine.view
        due = self._checkpoints.is_due(step + 1, first=view is None or view.members[0] == self._machine.me)
        pace = self._pace.took([float(one) for one in durations_s])
        mark = secrets.randbits(63) if due else 0
        brings = None if self._machine.step_rules.whole else self._gradients.brings()
        said = self._audits.said(step, view.members if view is not None else ())
        saving = self._checkpoints.saving
        self._tell(m.Computed(step, due, saving, pace, said=said, mark=mark, shards=brings, over=over))
