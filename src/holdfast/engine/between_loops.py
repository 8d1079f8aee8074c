"""What a worker does between two loops of its script: before the script's lines there, and after those that it passes.

Belongs to the thread of the user's loop. What is decided is in membership/loop_ends.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from holdfast.engine.transfer.state_transfer import StateTransfer
from holdfast.membership.loop_ends import LoopCount, Turn
from holdfast.membership.machine import Machine
from holdfast.state.snapshot import Snapshot


class BetweenLoops:
    """`wait_while` runs the protocol for as long as something holds; `metrics` are those after so many steps."""

    def __init__(
        self,
        machine: Machine,
        transfer: StateTransfer,
        *,
        wait_while: Callable[[Callable[[], object]], None],
        metrics: Callable[[int], Mapping[str, float]],
    ) -> None:
        self._machine = machine
        self._holder = transfer.holder
        self._desk = transfer.desk
        self._capture = transfer.capture
        self._checkpoints = transfer.checkpoints
        self._wait_while = wait_while
        self._metrics = metrics
        self._arrived: Snapshot | None = None  # the state that I came with, while I pass loops that were over before

    def end(self, step: int) -> None:
        """A loop ends at this step for all members. What the script does next may change the state."""
        self.let_them_read()
        keepers = self._machine.keepers()
        if self._machine.me in keepers:
            # Who is known to be lost would never write its share. Parts have the same names however many write them.
            there = tuple(one for one in keepers if one == self._machine.me or self._machine.is_here(one))
            self._checkpoints.save_last(step, there, self._metrics(step))

    def let_them_read(self) -> None:
        """Before the script's lines, which may change the state."""
        self._wait_while(self._machine.readers)
        self._desk.withdraw()  # for a joiner whose lease is gone, and which is not: nobody waits for it any more
        self._checkpoints.wait_copied()

    @property
    def are_passed(self) -> bool:
        """The script's lines that run now are in the state already."""
        return self._arrived is not None

    def keep(self, step: int) -> None:
        """The state as it came, while the script's lines run that are in it already."""
        self._arrived = self._holder.capture(step).copied()

    def left(self, count: LoopCount, step: int) -> None:
        """The loop is behind this process, however it was left. If it was passed, the state is kept as it came."""
        if count.leave():
            self.keep(step)
            self._holder.as_the_script_built_it()

    def begin(self) -> None:
        """The next loop begins. What the script did after a loop that it passed is in the state already: not twice."""
        if self._arrived is not None:
            self._holder.restore(self._arrived)
            self._arrived = None
        self._capture.buffers.rebase()  # the script's lines may have changed buffers too


__all__ = ["BetweenLoops", "LoopCount", "Turn"]
