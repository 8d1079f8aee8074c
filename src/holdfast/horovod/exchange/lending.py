"""Shared room for data that this rank has lent: it is given back when all who read it have said that they are done.

Others may be done with a collective before this rank has begun it, so what they say is kept. Guarded by the exchange.
"""

from __future__ import annotations

from collections.abc import Set

from holdfast.horovod.exchange.carrier import Carrier
from holdfast.horovod.exchange.work import Work


class Lending:
    def __init__(self, carrier: Carrier, rank: int) -> None:
        self._carrier = carrier
        self._rank = rank
        self._lent: dict[int, Work] = {}  # done here; by my serial
        self._done_by: set[tuple[int, int]] = set()  # (rank, its serial)

    def __bool__(self) -> bool:
        return bool(self._lent)

    def done(self, rank: int, serial: int) -> None:
        self._done_by.add((rank, serial))

    def finished(self, serial: int, work: Work, left: Set[int]) -> None:
        """This rank needs no more of a collective whose data is shared."""
        if work.mine.offset is None:
            self._forget(work)
        else:
            self._lent[serial] = work
            self.give_back(left)

    def give_back(self, left: Set[int]) -> None:
        """What all are done with; `left`: ranks that have left, and read no more."""
        for serial, work in list(self._lent.items()):
            others = [rank for rank in work.ranks if rank != self._rank and rank not in left]
            if all((rank, work.serials[rank]) in self._done_by for rank in others):
                del self._lent[serial]
                assert work.mine.offset is not None
                self._carrier.free(work.mine.offset)
                self._forget(work)

    def _forget(self, work: Work) -> None:
        self._done_by -= {(rank, work.serials[rank]) for rank in work.ranks}
