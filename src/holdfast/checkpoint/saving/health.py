"""Whether storage does what it is asked, as a saver finds it out: said when it changes, with the cause.

Belongs to the saver's thread; `trouble` may be read by any.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.checkpoint.saving.saved import SaverNews
from holdfast.core.errors import StorageError


class StorageHealth:
    def __init__(self, told: SaverNews, clock: Callable[[], float]) -> None:
        self._told = told
        self._clock = clock
        self.down_at: float | None = None
        self.trouble: StorageError | None = None  # the newest, as long as it lasts

    def ill(self, error: StorageError) -> None:
        """Said once, and once more where it becomes something that somebody must act on: names change with the step."""
        if self.down_at is None:
            self.down_at = self._clock()
        known, self.trouble = self.trouble, error
        if type(error) is not type(known):
            self._told.trouble(error.message)

    def well(self) -> None:
        """Something of a save has arrived. That storage can be listed says nothing: a full disk can be, too."""
        if self.down_at is not None:
            self._told.recovered(self._clock() - self.down_at)
            self.down_at, self.trouble = None, None
