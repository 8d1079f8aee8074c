"""Elastic mode with a quorum: a worker that is late answers by its stand-in, so that the others need not wait for it.

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

import os
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from holdfast.core.errors import ConfigError
from holdfast.core.words import KEY_SIZE, decode_whole
from holdfast.ledger.port import Ledger
from holdfast.membership import messages as m
from holdfast.membership.phases import STEP_PHASES, Phase
from holdfast.reduce.layout import Layout
from holdfast.reduce.reduction import Kept
from holdfast.run.standing_in import StandIn
from holdfast.run.worker import Worker

BEHIND_MAX = 64  # steps; each that a worker is behind costs it the memory of one gradient ...
BEHIND_BYTES_MAX = 1 << 30  # ... of which it keeps no more than this, ...
BEHIND_MIN = 4  # ... but so many however large they are


class QuorumWorker(Worker):
    """`quorum`: so many others with shards need not wait for this one."""

    def __init__(self, *arguments: Any, quorum: int, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._quorum = quorum
        self._at = 0  # the step of the user's loop
        self._closed = -1  # the last step that was closed for the training thread
        self._missed: deque[Kept] = deque()
        self._layout: Layout | None = None
        self._stand_in = StandIn(self._act, lambda: os.eventfd_write(self._mailbox.fd, 1))

    # ---- the training thread's side

    @contextmanager
    def away(self, step: int) -> Iterator[None]:
        self._at = step
        with self._stand_in.away():
            yield

    def has_closed(self, step: int) -> bool:
        return step <= self._closed

    def too_late(self, durations_s: Sequence[float]) -> None:
        self._pace.took(durations_s)

    def due(self) -> m.Compute | None:
        return m.Compute(self._at, ()) if self.has_closed(self._at) else None

    def missed(self, step: int) -> Kept | None:
        return self._missed.popleft() if self._missed and self._missed[0].step == step else None

    def advance(self) -> m.Compute | m.Commit:
        directive = super().advance()
        if isinstance(directive, m.Compute):  # perhaps once more, in another view
            self._closed = min(self._closed, directive.step - 1)
        return directive

    def begin(self, step: int) -> None:
        layout = self._exact.layout()
        if self._layout is not None and layout is not self._layout:
            raise ConfigError(
                "parameters were frozen or thawed during the training, and a late worker would not know of it",
                hint="leave requires_grad as it is after the first step, or leave out quorum",
            )
        self._layout = layout
        super().begin(step)

    def tell(self, event: m.Event) -> None:
        """The machine may have been told long ago that a step is applied."""
        if isinstance(event, m.Applied):
            self._at = event.step + 1
            if event.step < (self.machine.next or 0):
                return
        super().tell(event)

    def close(self) -> None:
        self._stand_in.close()
        super().close()

    # ---- the stand-in's side

    def _act(self) -> bool:
        machine = self.machine
        self._drain()
        if self._ended is not None or machine.phase not in STEP_PHASES:
            return False
        if machine.phase is Phase.APPLYING:
            return self._put_by()
        if machine.closes(self._quorum):
            assert machine.next is not None
            self._close_step(machine.next)
        else:
            self._wait()
        return True

    def _close_step(self, step: int) -> None:
        assert self.machine.view is not None
        if step != self._at:  # the user's loop is still in an earlier one
            self.gradients.begin(step, self.machine.view.number)
        self._closed = step
        self._directive = None
        self.computed(step, ())

    def _put_by(self) -> bool:
        """A step is committed. Go on to the next as if it were applied, unless the state is needed for that."""
        kept = self.gradients.kept
        assert kept is not None and kept.step == self.machine.next
        copy = replace(kept, memory=kept.memory.clone(), is_intact=lambda: True)
        if not kept.is_intact():
            self._ended = m.End("evicted", "the others went on while this worker was away")
            return False
        self._missed.append(copy)
        self._directive = None
        if self.machine.needs_state or len(self._missed) >= self._behind_max(kept.memory.numel()):
            return False  # the training thread will tell that the step is applied
        self._queue.append(m.Applied(kept.step))
        self._drain()  # before the training thread asks whether the machine knows
        return True

    @staticmethod
    def _behind_max(size_bytes: int) -> int:
        return max(BEHIND_MIN, min(BEHIND_MAX, BEHIND_BYTES_MAX // max(1, size_bytes)))


def check_size(quorum: int, ledger: Ledger) -> None:
    """ConfigError for more than the run has. Only for a run on one host: of several, not all may be there yet."""
    sizes = [decode_whole(entry.value, "workers") or 0 for entry in ledger.read(KEY_SIZE).entries]
    if quorum > sum(sizes) > 0:
        raise ConfigError(
            f"quorum={quorum} waits for more workers than the {sum(sizes)} of the run",
            hint="a quorum is smaller than --workers by as many as may be late",
        )


def moded(mode: str, quorum: int | None) -> dict[str, Any]:
    """As the run's settings have it, where a quorum of 0 is none: so nobody may ask for 0."""
    if quorum is not None and (type(quorum) is not int or quorum < 1):
        raise ConfigError(f"quorum is {quorum!r}", hint="how many workers a step waits for, at least 1")
    return {"mode": mode, "quorum": quorum or 0}
