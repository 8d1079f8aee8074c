"""Whether all ranks wait for each other, for ever: found by one of them, told to the others, who give up alike.

Guarded by the exchange.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from holdfast.core.errors import ProtocolError
from holdfast.horovod.exchange.matching import Matching
from holdfast.horovod.exchange.records import Record, What

CHARACTERS_MAX = 4096
STILL_S = 3.0  # all wait, and nothing has changed since: a script may submit from another thread meanwhile


class CollectiveStandstill:
    def __init__(self, matching: Matching) -> None:
        self._matching = matching
        self._since: float | None = None
        self._number = 0  # of those that were given up

    def moved(self) -> None:
        """A rank has said something."""
        self._since = None

    def look(self, now: float) -> tuple[Record, str] | None:
        """What to tell the others, and why, when there is one; it is given up then."""
        why = self._matching.standstill()[:CHARACTERS_MAX]
        if not why:
            self._since = None
            return None
        if self._since is None:
            self._since = now
        if now - self._since <= STILL_S:
            return None
        void = self._matching.heard_of()
        text = json.dumps([why, list(void.items())]).encode()
        self._give_up(void)
        return Record(What.STALL, count=self._number, text=text), why

    def heard(self, record: Record) -> str:
        """Another rank has found one. Why, or nothing where this rank has found it, too."""
        if record.count <= self._number:
            return ""
        try:
            why, void = json.loads(record.text)
            self._give_up({int(rank): int(serial) for rank, serial in void})
        except (ValueError, TypeError) as error:
            raise ProtocolError("a rank told of a standstill in words that make no sense") from error
        return str(why)

    def _give_up(self, void: Mapping[int, int]) -> None:
        self._number += 1
        self._since = None
        self._matching.give_up(void)
