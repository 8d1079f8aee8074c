"""Which updates of which workers are in the log: part of the replicated state, so that a retry is no second update.

For each worker the table holds its newest incarnation, the highest sequence up to which everything is there, and the
indices of what is there within a window around it. A worker has no more updates under way than the window is wide, so
the table is bounded. A worker that is known to be gone leaves one number behind: the incarnation from which on its
name may be used again. Without that a message which was delayed on the way would count as a new worker's.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.log.messages import Remembered, Update


@dataclass(frozen=True, slots=True)
class Verdict:
    """New: neither `index` nor `refusal`. `index`: it is in the log there; 0: it was, long ago.

    `gone`: it is refused for good.
    """

    index: int | None = None
    refusal: str = ""
    gone: bool = False

    @property
    def is_new(self) -> bool:
        return self.index is None and not self.refusal


@dataclass(slots=True)
class _Worker:
    incarnation: int
    gone: bool
    contiguous: int  # every sequence up to here is there
    indices: dict[int, int]  # sequence -> index, for the newest of them


class Deduplication:
    def __init__(self, window: int, remembered: tuple[Remembered, ...] = ()) -> None:
        self._window = window
        self._workers = {
            one.worker: _Worker(one.incarnation, one.gone, one.contiguous, dict(one.indices)) for one in remembered
        }

    def export(self) -> tuple[Remembered, ...]:
        return tuple(
            Remembered(name, one.incarnation, one.gone, one.contiguous, tuple(sorted(one.indices.items())))
            for name, one in sorted(self._workers.items())
        )

    def copy(self) -> Deduplication:
        return Deduplication(self._window, self.export())

    def judge(self, update: Update) -> Verdict:
        known = self._workers.get(update.worker)
        if known is not None and (update.incarnation, False) < (known.incarnation, known.gone):
            return Verdict(refusal=f"incarnation {update.incarnation} of {update.worker} is gone", gone=True)
        if known is None or update.incarnation > known.incarnation:
            known = _Worker(update.incarnation, False, 0, {})
        if update.sequence in known.indices:
            return Verdict(index=known.indices[update.sequence])
        if update.sequence <= known.contiguous:
            return Verdict(index=0)
        if update.sequence > known.contiguous + self._window:
            return Verdict(
                refusal=f"sequence {update.sequence} is more than {self._window} past {known.contiguous}, "
                f"up to which {update.worker}'s updates are here"
            )
        return Verdict()

    def record(self, update: Update, index: int) -> None:
        assert self.judge(update).is_new, (update, index)
        known = self._workers.get(update.worker)
        if known is None or update.incarnation > known.incarnation:
            known = self._workers[update.worker] = _Worker(update.incarnation, False, 0, {})
        known.indices[update.sequence] = index
        while known.contiguous + 1 in known.indices:
            known.contiguous += 1
            known.indices.pop(known.contiguous - self._window, None)

    def knows(self, worker: str, incarnation: int) -> bool:
        known = self._workers.get(worker)
        return known is not None and not known.gone and known.incarnation == incarnation

    def has_all(self, worker: str, incarnation: int, sequence: int) -> bool:
        """Everything of this incarnation up to this sequence is there, or it is gone."""
        known = self._workers.get(worker)
        if known is None:
            return False
        if (known.incarnation, known.gone) > (incarnation, False):
            return True
        return known.incarnation == incarnation and known.contiguous >= sequence

    def newest(self) -> dict[tuple[str, int], int]:
        """The newest sequence that is there of each worker that is not gone."""
        return {
            (name, one.incarnation): max([one.contiguous, *one.indices])
            for name, one in self._workers.items()
            if not one.gone
        }

    def forget(self, worker: str, incarnation: int) -> None:
        if self.knows(worker, incarnation):
            self._workers[worker] = _Worker(incarnation, True, 0, {})
