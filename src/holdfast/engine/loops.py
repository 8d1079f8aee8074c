"""How far a script is, beside its steps: what travels with the snapshot under our own name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.engine.api.records import Records
from holdfast.membership.loop_ends import LoopCount
from holdfast.modes.diverging import Losses
from holdfast.modes.port import DataPlan

NOT_LEFT = (-1, 0)


class Loops:
    """How many loops over steps the script has been through. Travels with the snapshot: a joiner must know which of
    them, and of the lines between them, are in the state that it was given."""

    def __init__(self, losses: Losses, data: DataPlan) -> None:
        self.count = LoopCount()
        self.left = NOT_LEFT  # the loop that the script left early, and how far it was to go
        self.losses = losses  # of the last steps: they travel with the same part of the snapshot
        self.data = data  # and so does where the run is in its data
        self.records = Records()  # what the script has recorded outside the shards

    def leave(self, goal: int) -> None:
        """The script leaves the loop that it is in, before `goal` steps or epochs."""
        self.left = (self.count.passed, goal)

    def is_left(self, goal: int, step: int) -> bool:
        """Whether the script has stopped before this step, or had in this loop by the state's account.

        With more to do than it had then, it goes on.
        """
        if self.left[0] == self.count.passed and goal > self.left[1]:
            self.left, self.records.stop = NOT_LEFT, None
        if self.records.stops_before(step) and self.left[0] != self.count.passed:
            self.leave(goal)
        return self.left[0] == self.count.passed

    def state_dict(self) -> dict[str, Any]:
        left = {"left": self.left[0], "left_goal": self.left[1]} if self.left != NOT_LEFT else {}
        return {"done": self.count.done, **left, **self.losses.state(), **self.data.state(), **self.records.state()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.count.done = int(state_dict["done"])
        self.left = (int(state_dict.get("left", -1)), int(state_dict.get("left_goal", 0)))
        self.losses.load(state_dict)
        self.records.load(state_dict)
        self.data.load(state_dict)
