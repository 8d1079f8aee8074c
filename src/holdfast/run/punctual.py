"""What the user's loop asks of a worker that may be late. This one is not: nobody goes on without it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

from holdfast.membership import messages as m
from holdfast.reduce.reduction import Kept


class Punctual:
    def away(self, step: int) -> AbstractContextManager[None]:
        """While the user's lines compute a shard of this step."""
        return nullcontext()

    def has_closed(self, step: int) -> bool:
        """Whether what is still computed of it comes too late."""
        return False

    def too_late(self, durations_s: Sequence[float]) -> None:
        """The shards of a closed step took so long each."""

    def due(self) -> m.Compute | None:
        """The step that the user's loop is to begin next, if it was closed already."""
        return None

    def missed(self, step: int) -> Kept | None:
        """The mean of a step that was committed while the loop was away."""
        return None
