"""A quorum's attendance: a worker that is late answers by its stand-in, so that the others need not wait for it.

When so many others have brought shards to a step and this worker's training thread is still in one of its own, the
stand-in closes the step for this worker: it brings what is finished, perhaps nothing, and takes part in the reduction.
So every member says for itself what it brings, all add the same, and nobody had to decide anything for another. If
the training thread stays away, the stand-in does the same in the steps that follow, with nothing to bring. Their means
are put by. When the training thread is back it drops the shard that came too late, applies the means through the user's
own lines, as steps without batches, and is level.

The machine is told that a step is applied when its mean is put by; the state follows. Therefore the stand-in stops
where the state itself is needed: at a checkpoint, at a change of the view, at the end. There all wait for the late one,
as they do when it is too far behind.

Everything here belongs to whoever has the word: the training thread, or its stand-in while that is in a shard.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

from holdfast.core.errors import ConfigError
from holdfast.membership import messages as m
from holdfast.membership.phases import STEP_PHASES, Phase
from holdfast.modes.capture import GradientCapture
from holdfast.modes.elastic.stand_in import StandIn
from holdfast.modes.port import Attendance, Runtime
from holdfast.reduce.layout import Layout
from holdfast.reduce.reduction import KeptMean

BEHIND_MAX = 64  # steps; each that a worker is behind costs it the memory of one gradient ...
BEHIND_BYTES_MAX = 1 << 30  # ... of which it keeps no more than this, ...
BEHIND_MIN = 4  # ... but so many however large they are


class QuorumAttendance(Attendance):
    in_step = False

    _runtime: Runtime
    _stand_in: StandIn

    def __init__(self) -> None:
        self._at = 0  # the step of the user's loop
        self._closed = -1  # the last step that was closed for the training thread
        self._missed: deque[KeptMean] = deque()
        self._layout: Layout | None = None

    def attach(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._stand_in = StandIn(self._act, runtime.wake)

    # ---- the training thread's side

    def away(self, step: int) -> AbstractContextManager[None]:
        self._at = step
        return self._stand_in.away()

    def has_closed(self, step: int) -> bool:
        return step <= self._closed

    def too_late(self, durations_s: Sequence[float]) -> None:
        self._runtime.note_pace(durations_s)

    def due(self) -> m.Compute | None:
        return m.Compute(self._at, ()) if self.has_closed(self._at) else None

    def missed(self, step: int) -> KeptMean | None:
        return self._missed.popleft() if self._missed and self._missed[0].step == step else None

    def given(self, directive: m.Compute | m.Commit) -> None:
        if isinstance(directive, m.Compute):  # perhaps once more, in another view
            self._closed = min(self._closed, directive.step - 1)

    def begins(self, capture: GradientCapture) -> None:
        layout = capture.layout()
        if self._layout is not None and layout is not self._layout:
            raise ConfigError(
                "parameters were frozen or thawed during the training, and a late worker would not know of it",
                hint="leave requires_grad as it is after the first step, or leave out quorum",
            )
        self._layout = layout

    def knows_of(self, applied: int) -> bool:
        """The machine may have been told long ago."""
        self._at = applied + 1
        return applied < (self._runtime.machine.next or 0)

    def close(self) -> None:
        self._stand_in.close()

    # ---- the stand-in's side

    def _act(self) -> bool:
        runtime, machine = self._runtime, self._runtime.machine
        runtime.drain()
        if runtime.is_ending or machine.phase not in STEP_PHASES:
            return False
        if machine.phase is Phase.APPLYING:
            return self._put_by()
        if machine.closes():
            assert machine.next is not None
            self._close_step(machine.next)
        else:
            runtime.wait()
        return True

    def _close_step(self, step: int) -> None:
        if step != self._at:  # the user's loop is still in an earlier one
            self._runtime.begin_step(step)
        self._closed = step
        self._runtime.drop_directive()
        self._runtime.computed(step, ())

    def _put_by(self) -> bool:
        """A step is committed. Go on to the next as if it were applied, unless the state is needed for that."""
        runtime, machine = self._runtime, self._runtime.machine
        kept = runtime.kept
        assert kept is not None and kept.step == machine.next
        copy = replace(kept, memory=kept.memory.clone(), is_intact=lambda: True)
        if not kept.is_intact():
            runtime.end(m.End("evicted", "the others went on while this worker was away"))
            return False
        self._missed.append(copy)
        runtime.drop_directive()
        if machine.needs_state or kept.over or len(self._missed) >= self._behind_max(kept.memory.numel()):
            return False  # the training thread will tell that the step is applied
        runtime.tell(m.Applied(kept.step))
        runtime.drain()  # before the training thread asks whether the machine knows
        return True

    @staticmethod
    def _behind_max(size_bytes: int) -> int:
        return max(BEHIND_MIN, min(BEHIND_MAX, BEHIND_BYTES_MAX // max(1, size_bytes)))
