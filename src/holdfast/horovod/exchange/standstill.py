"""Whether ranks wait for each other, for ever: found by one of them, told to the others, who give up alike.

Guarded by the exchange.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from holdfast.core.errors import ProtocolError
from holdfast.horovod.exchange.matching import Ident, Matching
from holdfast.horovod.exchange.records import TEXT_BYTES_MAX, Record, What

CHARACTERS_MAX = 4096
IDENT_BYTES = 64  # of one in a record, beside its key
STILL_S = 3.0  # these ranks have waited so since: a script may submit from another thread meanwhile
Found = tuple[str, list[Ident]]  # why, and what is given up that was pending here


class CollectiveStandstill:
    def __init__(self, matching: Matching) -> None:
        self._matching = matching
        self._why = ""
        self._since = 0.0

    def look(self, now: float, left: AbstractSet[int]) -> tuple[Record, Found] | None:
        """What to tell the others, when there is one; it is given up then."""
        why, idents = self._matching.standstill(left)
        if why != self._why:
            self._why, self._since = why, now
        if not why or now - self._since <= STILL_S:
            return None
        why, idents = why[:CHARACTERS_MAX], _fitting(idents)
        self._why = ""
        return Record(What.STALL, text=json.dumps([why, idents]).encode()), (why, self._matching.give_up(idents))

    def heard(self, record: Record) -> Found:
        """Another rank has found one. Two may find the same, or two of them at once: all of it is given up."""
        try:
            why, said = json.loads(record.text)
            idents = [(int(members), str(key), int(count)) for members, key, count in said]
        except (ValueError, TypeError) as error:
            raise ProtocolError("a rank told of a standstill in words that make no sense") from error
        return str(why), self._matching.give_up(idents)


def _fitting(idents: Sequence[Ident]) -> list[Ident]:
    """As many as one record holds. The first are those that ranks wait for; the rest is found when somebody waits."""
    left, found = TEXT_BYTES_MAX // 2, list[Ident]()
    for ident in idents:
        left -= len(json.dumps(ident[1])) + IDENT_BYTES
        if left < 0 and found:
            break
        found.append(ident)
    return found
