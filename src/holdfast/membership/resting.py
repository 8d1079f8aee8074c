"""Who is registered and yet not taken in for now: those left out, and joiners with whom views failed. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.core.words import View, host_of
from holdfast.membership.view_rules import LedgerState, Timing, propose_planned

DOUBLINGS_MAX = 16
FORMER_MAX = 1000


class Resting:
    """Belongs to a machine. A slot rests longer each time that a joiner from it could not be reached.

    It is the slot that rests: whoever was left out ends, and comes back as a new worker with a new id.
    """

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._former: set[str] = set()  # took part, were left out: an id is either in or out, never in again
        self._slots: dict[tuple[str, str], tuple[int, float]] = {}  # (slot, host) -> failures, when it may come in
        self._planned: tuple[LedgerState, frozenset[str], View | None] | None = None

    def left_out(self, members: Iterable[str], formed: frozenset[str], ledger: LedgerState, now: float) -> None:
        """These are not in the next view. Who took part is out for good; a joiner that still lives must rest."""
        for member in members:
            if member in formed:
                self._former.add(member)
            elif member in ledger.ids:
                failures = self._slots.get(_place(member), (0, 0.0))[0]
                rest_s = min(self._timing.rest_s * (1 << min(failures, DOUBLINGS_MAX)), self._timing.rest_s_max)
                self._slots[_place(member)] = (failures + 1, now + rest_s)

    def former(self, ledger: LedgerState) -> tuple[str, ...]:
        """Whom I tell those that come later of: it may wake up and register again before it sees that it is out."""
        self._former -= ledger.dead
        return tuple(sorted(self._former))[:FORMER_MAX]

    def told(self, former: Iterable[str]) -> None:
        self._former.update(former)

    def formed(self, members: Iterable[str]) -> None:
        for member in members:
            self._slots.pop(_place(member), None)

    def planned(self, me: str, ledger: LedgerState, now: float) -> View | None:
        """The view that `me`, whose group works, should propose, without those who rest. Asked in every step: there is
        another answer only when the ledger has changed, or a rest is over."""
        resting = self.among(ledger, now)
        if self._planned is None or self._planned[0] is not ledger or self._planned[1] != resting:
            self._planned = (ledger, resting, propose_planned(me, ledger, resting).view)
        return self._planned[2]

    def among(self, ledger: LedgerState, now: float) -> frozenset[str]:
        """Those of the registered workers that are not taken in now."""
        if not self._former and not self._slots:
            return frozenset()
        return frozenset(
            id for id in ledger.ids if id in self._former or now < self._slots.get(_place(id), (0, now))[1]
        )


def _place(worker: str) -> tuple[str, str]:
    """The slot, and the host it is on: what stays the same when a worker is replaced."""
    return worker.partition(".")[0], host_of(worker)
