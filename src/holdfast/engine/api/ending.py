"""How a script comes to its end, and what is done about it: what is saved, waited for, and said.

A loop over steps ends by itself or by the script's `break`: its state is saved there, since the lines after it may
change anything. Or an exception leaves it. That may be caught, and is then a way to stop early, or it ends the script:
`sys.exit(0)` in the middle of the training is no end of the training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from holdfast.core.errors import ConfigError, CutShort
from holdfast.engine.api.script_place import ScriptPlace
from holdfast.engine.loops import NOT_LEFT, Loops
from holdfast.engine.recovery.leaving import say_unsaved
from holdfast.engine.worker import Worker
from holdfast.events import EventLog


class Ending:
    """Belongs to the thread of the user's loop."""

    def __init__(self, worker: Worker, events: EventLog, loops: Loops) -> None:
        self._worker = worker
        self._events = events
        self._loops = loops
        self.at: dict[str, Any] | None = None  # where the last loop ended
        self.entered: ScriptPlace | None = None  # where the script has begun the last loop
        self.cut: ScriptPlace | None = None  # where an exception left a loop
        self._goal = 0
        self._waits: BaseException | None = None

    def enter_loop(self, place: ScriptPlace, goal: int) -> None:
        self.entered, self._goal = place, goal

    def leave_loop(self, place: ScriptPlace, leave: Callable[[], None], goal: int) -> None:
        """The loop is left before its end. Nothing may be raised here: Python would only print it."""
        if not place.by_choice or self._worker.is_over:
            self.cut = place
            return
        try:
            self._loops.leave(goal)
            leave()
        except ConfigError:
            self._loops.left, self.cut = NOT_LEFT, place  # in the middle of a step: it is told when the loop comes back
        except BaseException as error:
            self._waits = error

    def goes_on(self) -> bool:
        """Another loop begins. Whether the last one was left by an exception, and is behind the script only now."""
        cut, self.cut = self.cut, None
        return cut is not None

    def raise_what_waits(self) -> None:
        error, self._waits = self._waits, None
        if error is not None:
            raise error

    def in_the_middle(self, step: int, *, whole: bool, torn: bool, at_exit: bool) -> bool:
        """The script ends, and a loop was left in the middle; the state is that of `step`.

        True: it stopped early, by an exception of its own, after a whole step. Unsaved if the state cannot be saved.
        """
        checkpoints = self._worker.checkpoints
        if torn:
            raise say_unsaved(self._events, checkpoints, step, "the script ended in the middle of an update")
        # A loop whose iterator the script keeps is not told that it is left, or when the script is no more.
        place = self.cut if self.cut is not None and self.cut.is_known else self.entered
        caught = not at_exit or (place is not None and not place.is_still_there())
        if whole and caught:
            self._loops.leave(self._goal)
        why = self._worker.save_now(step)
        if why:
            raise say_unsaved(self._events, checkpoints, step, why)
        return whole and caught

    def cut_short(self, step: int, steps: int, *, at_exit: bool) -> None:
        """It was not the script's way to stop early."""
        saved, uri = self._worker.checkpoints.newest()
        self._events.write("cut_short", step=step, steps=steps, **({"uri": uri} if saved == step else {}))
        if at_exit:
            raise CutShort(f"the script ended at step {step} of {steps}")

    def conclude(self, *, failed: bool) -> None:
        """The script is over. Unsaved if its last state should be in storage, and cannot be brought there."""
        self.raise_what_waits() if not failed else None
        if self.at is None:
            return
        why = self._worker.checkpoints.settle(self.at["step"])
        if why:
            raise say_unsaved(self._events, self._worker.checkpoints, self.at["step"], why)
