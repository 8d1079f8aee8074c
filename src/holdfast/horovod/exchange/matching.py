"""Which collectives are complete: every rank of the process set has asked for it, or has joined. Pure.

Every rank hears what every other rank submits, each rank's in its own order, and finds out by itself, and all alike,
what is complete and what does not fit. Nobody coordinates, and no order between collectives is needed.

A collective is known by its process set, its key and a count: how often this key was used before. Counts stay level
between ranks because whoever has joined counts what the others do without it, and because the number of a process set
is never used twice. What is asked for in process sets of others is followed, too: to see who waits for whom.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field

from holdfast.horovod.exchange.words import Kind, Request, disagreement

Ident = tuple[int, str, int]  # process set, key, count


@dataclass(frozen=True)
class Announced:
    """A request as a rank has submitted it. `serial` is that rank's own number for it.

    Its bytes are in `inline`, or `length` bytes at `offset` of the memory that the rank shares, or come later.
    """

    request: Request
    serial: int
    count: int
    inline: bytes | None = None
    offset: int = 0
    length: int = 0


@dataclass
class Matched:
    """A collective that is complete. `trouble`: why it fails, the same on every rank."""

    ident: Ident
    parts: Mapping[int, Announced]  # by rank, of those who take part
    trouble: str = ""

    @property
    def ranks(self) -> list[int]:
        return sorted(self.parts)


@dataclass
class _Pending:
    """`epoch`: how often those who submit it had joined before."""

    epoch: int
    parts: dict[int, Announced] = field(default_factory=dict)


@dataclass
class Matching:
    """Owned by the exchange. Ranks are those of the view; `sets` are the process sets by number."""

    me: int
    size: int
    sets: dict[int, tuple[int, ...]] = field(default_factory=dict)
    last_joined: int = -1
    _pending: dict[Ident, _Pending] = field(default_factory=dict)
    _counts: dict[tuple[int, str], int] = field(default_factory=dict)  # how often I took part
    _joins: dict[int, int] = field(default_factory=dict)  # rank -> how often it has joined
    _waits: dict[int, int] = field(default_factory=dict)  # rank -> the serial that it waits for
    _given_up: set[Ident] = field(default_factory=set)  # what somebody may still submit without having heard of it
    _early: list[tuple[int, Announced]] = field(default_factory=list)  # of process sets that I do not know yet

    def __post_init__(self) -> None:
        self.sets.setdefault(0, tuple(range(self.size)))

    def next_count(self, members: int, key: str) -> int:
        """The count of the collective that I submit next under this key."""
        count = self._counts.get((members, key), 0)
        while (members, key, count) in self._given_up:
            count += 1
        self._counts[members, key] = count + 1
        return count

    def heard(self, rank: int, announced: Announced) -> list[Matched]:
        """What is complete now that this rank has submitted this."""
        request = announced.request
        self._waits.pop(rank, None)
        if request.members not in self.sets:
            self._early.append((rank, announced))  # it has made a process set that I am about to make
            return []
        ident = (request.members, request.key, announced.count)
        if ident in self._given_up:
            return []
        epoch = self._joins.get(rank, 0)
        pending = self._pending.setdefault(ident, _Pending(epoch))
        pending.parts[rank] = announced
        if request.kind is Kind.JOIN:
            self._joins[rank] = epoch + 1
            return [found for one in list(self._pending) if (found := self._complete(one)) is not None]
        found = self._complete(ident)
        return [found] if found is not None else []

    def _lacks(self, ident: Ident) -> list[int]:
        """Who must still submit it. Whoever has joined since takes no part, but in the join itself."""
        pending = self._pending[ident]
        joining = any(one.request.kind is Kind.JOIN for one in pending.parts.values())
        return [
            rank
            for rank in self.sets[ident[0]]
            if rank not in pending.parts and (joining or self._joins.get(rank, 0) <= pending.epoch)
        ]

    def _complete(self, ident: Ident) -> Matched | None:
        """If it is complete, and mine."""
        if self._lacks(ident):
            return None
        parts = self._pending.pop(ident).parts
        if self.me not in self.sets[ident[0]]:
            return None
        requests = {rank: one.request for rank, one in parts.items()}
        if all(request.kind is Kind.JOIN for request in requests.values()):
            self.last_joined = max(requests, key=lambda rank: (requests[rank].stamp, rank))
        absent = [rank for rank in self.sets[ident[0]] if rank not in parts]
        if self.me in absent:
            self.next_count(ident[0], ident[1])
        return Matched(ident, parts, disagreement(requests, absent))

    # ---- who waits for whom

    def waits(self, rank: int, serial: int) -> None:
        """This rank does nothing else until the collective with this serial is done."""
        self._waits[rank] = serial

    def is_waiting(self, rank: int) -> bool:
        """Whether what it has said that it waits for is not complete yet."""
        return rank in self._waits and self._waiting_for(rank) is not None

    def missing(self, ident: Ident) -> list[int]:
        return self._lacks(ident) if ident in self._pending else []

    def standstill(self, left: AbstractSet[int] = frozenset()) -> tuple[str, list[Ident]]:
        """Ranks that wait for each other, or for one that has left, for ever: why, and what cannot be done any more.

        Each of them waits for something that lacks one of them. Nobody ever waits for a rank that has joined, so what
        waits for the join goes on waiting. Empty: there is none.
        """
        waits = {rank: found for rank in self._waits if (found := self._waiting_for(rank)) is not None}
        waits = {rank: found for rank, found in waits.items() if found[1].kind is not Kind.JOIN}
        missing = {rank: self.missing(ident) for rank, (ident, _) in waits.items()}
        while hopeful := [rank for rank in waits if not any(one in waits or one in left for one in missing[rank])]:
            for rank in hopeful:
                del waits[rank]
        said = []
        for rank, (_, request) in sorted(waits.items()):
            names = ", ".join(map(str, missing[rank]))
            said.append(f"rank {rank} waits for {request.words}, which rank {names} has not submitted")
        return "; ".join(said), self._hopeless(waits, left) if said else []

    def _hopeless(self, waits: Mapping[int, tuple[Ident, Request]], left: AbstractSet[int]) -> list[Ident]:
        """What these wait for, and then whatever else some of them have submitted and others have not."""
        found = dict.fromkeys(ident for ident, _ in waits.values())
        for ident, pending in self._pending.items():
            joining = any(one.request.kind is Kind.JOIN for one in pending.parts.values())
            begun = any(rank in waits for rank in pending.parts)
            if begun and not joining and any(rank in waits or rank in left for rank in self._lacks(ident)):
                found[ident] = None
        return list(found)

    def _waiting_for(self, rank: int) -> tuple[Ident, Request] | None:
        for ident, pending in self._pending.items():
            mine = pending.parts.get(rank)
            if mine is not None and mine.serial == self._waits[rank]:
                return ident, mine.request
        return None

    def give_up(self, idents: Iterable[Ident]) -> list[Ident]:
        """After a standstill, which a rank finds and all hear of: those of them that were pending here.

        Who has submitted these, or does before it hears of it, did so for nothing; who has not goes on with the count
        after them.
        """
        idents = list(idents)
        self._given_up.update(idents)
        return [ident for ident in idents if self._pending.pop(ident, None) is not None]

    def needing(self, rank: int) -> list[Ident]:
        """What cannot be complete any more because this rank has left."""
        return [ident for ident in self._pending if rank in self._lacks(ident)]

    def drop(self, ident: Ident) -> None:
        self._pending.pop(ident, None)

    def add_set(self, number: int, ranks: Sequence[int]) -> list[Matched]:
        """What is complete in it already."""
        self.sets[number] = tuple(sorted(ranks))
        early, self._early = self._early, []
        return [found for rank, announced in early for found in self.heard(rank, announced)]

    def remove_set(self, number: int) -> list[Ident]:
        """Forget it, and what is asked for in it, which can never be complete."""
        self.sets.pop(number, None)
        dropped = [ident for ident in self._pending if ident[0] == number]
        for ident in dropped:
            del self._pending[ident]
        self._counts = {key: count for key, count in self._counts.items() if key[0] != number}
        return dropped
