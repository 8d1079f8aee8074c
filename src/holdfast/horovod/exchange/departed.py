"""Ranks that have left in order, and what they said last. Guarded by the exchange."""

from __future__ import annotations

from collections.abc import Iterable, Set

from holdfast.horovod.exchange.records import Record, What

SCRIPT_ENDED = "its script came to its end"
CHARACTERS_MAX = 500


class Departed:
    def __init__(self) -> None:
        self._why: dict[int, str] = {}

    def __bool__(self) -> bool:
        return bool(self._why)

    def __contains__(self, rank: int) -> bool:
        return rank in self._why

    @property
    def ranks(self) -> Set[int]:
        return self._why.keys()

    @property
    def ended(self) -> bool:
        """Whether the script of one of them is through."""
        return SCRIPT_ENDED in self._why.values()

    def heard(self, rank: int, record: Record) -> None:
        self._why[rank] = record.text.decode(errors="replace")

    def sentence(self, ranks: Iterable[int]) -> str:
        """What has become of the first of these."""
        rank = min(ranks)
        return f"rank {rank} has shut down" + (f": {self._why[rank]}" if self._why[rank] else "")


def farewell(why: str) -> Record:
    """A rank's last words."""
    return Record(What.BYE, text=why[:CHARACTERS_MAX].encode())
