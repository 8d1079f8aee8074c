"""What a worker's time goes into: the categories, and an account in which every instant is in exactly one. Pure."""

from __future__ import annotations

from typing import Final

COMPUTING: Final = "computing"  # shards, and the script's lines of a step: the update, an evaluation, logging
LOADING: Final = "loading"  # waiting for a batch
REDUCING: Final = "reducing"  # adding gradients up, and putting their mean into the model
WAITING: Final = "waiting"  # its own shards are done, those of slower workers are not
RECOVERING: Final = "recovering"  # from a loss that was noticed to the next commit; pauses without the ledger
CHECKPOINTING: Final = "checkpointing"  # training is held up by a save
JOINING: Final = "joining"  # from the start of a replacement to its first step, and while others are let in
STANDBY: Final = "standby"  # a spare, or one that starts or is missing while the run has all the workers it wants
SCRIPT: Final = "script"  # the script's lines after a loop over steps
STARTING: Final = "starting"  # from the start of the process to the first view of the run: nobody's loss
DOWN: Final = "down"  # nobody has the slot: its worker died, and the next has not started

OWN: Final = (COMPUTING, LOADING, REDUCING, WAITING, RECOVERING, CHECKPOINTING, JOINING, STANDBY, SCRIPT)
CATEGORIES: Final = (*OWN, STARTING, DOWN)
LEFT_OUT: Final = (STANDBY, STARTING)  # of goodput
LOST: Final = (RECOVERING, CHECKPOINTING, JOINING, DOWN)  # what failures cost, and the insurance against them


class Account:
    """Where one worker's time went, from `now` on. The clock never goes back."""

    def __init__(self, now: float) -> None:
        self.doing: str = JOINING
        self._seconds = dict.fromkeys(OWN, 0.0)
        self._began = self._since = now

    def switch(self, category: str, now: float) -> None:
        if category != self.doing:
            self._seconds[self.doing] += now - self._since
            self._since = now
            self.doing = category

    def took(self, category: str, began: float, now: float) -> None:
        """What lay between was of this category, whatever it is doing; as far as it is not accounted for yet."""
        began = max(began, self._since)
        self._seconds[self.doing] += began - self._since
        self._seconds[category] += now - began
        self._since = now

    def spent(self, now: float) -> dict[str, float]:
        """Seconds of each category so far; those that are 0 are left out. They add up to the time since it began."""
        seconds = dict(self._seconds)
        seconds[self.doing] += now - self._since
        return {category: spent for category, spent in seconds.items() if spent > 0.0}

    def age(self, now: float) -> float:
        return now - self._began
