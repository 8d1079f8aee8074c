"""The port through which an exchange reaches the other ranks, and the carrier of a rank that is alone.

A carrier brings every rank's records to every other, in the order of that rank, and pieces of data. It belongs to the
exchange; `publish` is called under the exchange's lock, `take` and `wait` by the one thread that drives it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from holdfast.core.errors import PeerError
from holdfast.horovod.exchange.packing import Ranges
from holdfast.horovod.exchange.records import Record

Serials = Mapping[int, int]  # rank -> its own number for the collective


class RankLost(PeerError):
    """A rank is gone, and had not said that it leaves."""

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(f"rank {rank} is lost: {reason}")
        self.rank = rank
        self.reason = reason


LOST_S = 0.5  # for what a rank has written before it ended, and for its word that it leaves


class Gone:
    """Ranks that are not there any more: their connections ended, or the ledger says so.

    The ledger may know before a rank's last words are read; and a process that a rank has forked may keep its
    connections open. So its word is believed after a moment.
    """

    def __init__(self) -> None:
        self._reasons: dict[int, str] = {}
        self._believed_at: dict[int, float] = {}
        self.left: set[int] = set()  # in order

    def __contains__(self, rank: int) -> bool:
        return rank in self._reasons

    def ended(self, rank: int, reason: str, *, after_s: float = 0.0) -> None:
        if self._believed_at.get(rank, math.inf) > (at := time.monotonic() + after_s):
            self._reasons[rank] = reason
            self._believed_at[rank] = at

    def check(self) -> None:
        """Nothing is left to be read: RankLost for who is gone and has not said that it leaves."""
        for rank, at in self._believed_at.items():
            if rank not in self.left and time.monotonic() >= at:
                raise RankLost(rank, self._reasons[rank])


class Carrier(Protocol):
    inline_max: int  # bytes of data that travel with the record itself
    in_place: bool  # peers read my data where it lies, so they say when they are done with it

    def stage(self, length: int) -> tuple[int, torch.Tensor] | None:
        """Room for data that others will need: its offset and its bytes. None: there is no room at the moment."""

    def free(self, offset: int) -> None: ...

    def publish(self, record: Record, *, urgent: bool = True) -> bool:
        """To all ranks. `urgent`: wake those that sleep. False: there is no room until others have read more."""

    @property
    def unsent(self) -> bool:
        """Whether something waits here to be sent, which needs somebody to drive."""

    def take(self) -> list[tuple[int, Record]]:
        """What ranks have written since. Raises RankLost when all that a lost rank wrote is taken."""

    def wait(self, at_most_s: float) -> None:
        """For something to take, or for `wake`."""

    def wake(self) -> None:
        """End a wait, from any thread."""

    def lose(self, rank: int, reason: str) -> None:
        """By the ledger, this rank is gone. From any thread."""

    def give(self, serial: int, phase: int, data: torch.Tensor, ranges: Mapping[int, Ranges]) -> None:
        """Let each rank have these bytes of mine. Returns at once; the data must not change until all is done."""

    def ready(self, serials: Serials, phase: int, wanted: Mapping[int, Ranges]) -> bool:
        """Whether everything that I want of these ranks is here."""

    def pieces(self, rank: int, serial: int, phase: int, block: tuple[int, int], ranges: Ranges) -> list[torch.Tensor]:
        """The bytes of the ranges, of a rank whose data is `block` (offset and length)."""

    def forget(self, serials: Serials) -> None:
        """Nothing of this collective is needed any more."""

    def intact(self, ranks: Sequence[int]) -> bool:
        """Whether what was read of these ranks is what they wrote."""

    def leave(self) -> None:
        """The last record was published: let the others have it, and close."""

    def close(self) -> None: ...


class Alone:
    """A world of one rank."""

    inline_max = 1 << 62
    in_place = False

    def stage(self, length: int) -> tuple[int, torch.Tensor] | None:
        return 0, torch.empty(length, dtype=torch.uint8)

    def free(self, offset: int) -> None:
        pass

    def publish(self, record: Record, *, urgent: bool = True) -> bool:
        return True

    @property
    def unsent(self) -> bool:
        return False

    def take(self) -> list[tuple[int, Record]]:
        return []

    def wait(self, at_most_s: float) -> None:
        pass

    def wake(self) -> None:
        pass

    def lose(self, rank: int, reason: str) -> None:
        pass

    def give(self, serial: int, phase: int, data: torch.Tensor, ranges: Mapping[int, Ranges]) -> None:
        pass

    def ready(self, serials: Serials, phase: int, wanted: Mapping[int, Ranges]) -> bool:
        return True

    def pieces(self, rank: int, serial: int, phase: int, block: tuple[int, int], ranges: Ranges) -> list[torch.Tensor]:
        raise AssertionError("there is no other rank")

    def forget(self, serials: Serials) -> None:
        pass

    def intact(self, ranks: Sequence[int]) -> bool:
        return True

    def leave(self) -> None:
        pass

    def close(self) -> None:
        pass
