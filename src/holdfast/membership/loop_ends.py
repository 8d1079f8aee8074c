"""What a script's loops over steps mean to a worker: which of them it passes, and what it does at the end of one. Pure.

A script may have several loops, with lines of its own between them: an evaluation, another learning rate, a save. The
state says how many of the loops, with the lines that follow them, are in it. A worker that comes later runs the script
from its first line, and must pass those loops: it takes no step in them, saves nothing and reports nothing, since
for the run they were over before it came; and it waits for nobody but those that read its state, if it is the one who
came by a checkpoint. What its script does after such a loop is undone.

At the end of a loop that it shares with the others it
- waits for those that may still read its state, since the script's next lines may change it (`Machine.readers`). Who
  has just come serves nobody and so waits for nobody: two that come in one view would wait for each other for ever;
- saves, together with those that brought the state with them (`Machine.keepers`). Who has just come does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Turn(Enum):
    """What a worker does when it is handed a step."""

    STEP = "step"  # the loop takes it
    END = "end"  # the loop is over, for this worker as for the others
    PASS = "pass"  # the loop was over before this worker's state was taken
    AHEAD = "ahead"  # this process has been through loops that its state has not: only a new process can follow it


@dataclass
class LoopCount:
    """How many loops over steps the script has been through. `done` travels with the state."""

    done: int = 0  # by the state's account
    passed: int = 0  # by this process

    @property
    def is_passing(self) -> bool:
        return self.passed < self.done

    def turn(self, *, over: bool) -> Turn:
        """`over`: the step that was handed out is not one of this loop."""
        if self.passed > self.done:
            return Turn.AHEAD
        if self.is_passing:
            return Turn.PASS
        return Turn.END if over else Turn.STEP

    def leave(self) -> bool:
        """The loop is behind this process. True: what the script does before its next loop is in the state already."""
        self.passed += 1
        done_before = self.passed <= self.done
        self.done = max(self.done, self.passed)
        return done_before
