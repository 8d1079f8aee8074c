"""Which collectives are complete: every rank of the process set has asked for it, or has joined. Pure.

Every rank hears what every other rank submits, each rank's in its own order, and finds out by itself, and all alike,
what is complete and what does not fit. Nobody coordinates, and no order between collectives is needed.

A collective is known by its process set, its key and a count: how often this key was used before. Counts stay level
between ranks because whoever has joined counts what the others do without it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    _serials: dict[int, int] = field(default_factory=dict)  # the newest of each rank
    _void: dict[int, int] = field(default_factory=dict)  # rank -> up to here nothing counts any more
    _early: list[tuple[int, Announced]] = field(default_factory=list)  # of process sets that I do not know yet

    def __post_init__(self) -> None:
        self.sets.setdefault(0, tuple(range(self.size)))

    def next_count(self, members: int, key: str) -> int:
        """The count of the collective that I submit next under this key."""
        count = self._counts.get((members, key), 0)
        self._counts[members, key] = count + 1
        return count

    def heard(self, rank: int, announced: Announced) -> list[Matched]:
        """What is complete now that this rank has submitted this."""
        request = announced.request
        self._waits.pop(rank, None)
        self._serials[rank] = announced.serial
        if request.members not in self.sets:
            self._early.append((rank, announced))  # it has made a process set that I am about to make
            return []
        if self.me not in self.sets[request.members]:
            return []
        ident = (request.members, request.key, announced.count)
        if announced.serial <= self._void.get(rank, 0):
            self._count_as_done(ident)
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
        if self._lacks(ident):
            return None
        parts = self._pending.pop(ident).parts
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

    def goes_on(self, rank: int) -> None:
        self._waits.pop(rank, None)

    def missing(self, ident: Ident) -> list[int]:
        return self._lacks(ident) if ident in self._pending else []

    def standstill(self) -> str:
        """Why nothing will ever be complete: every rank waits for something that is not. Empty: that is not so."""
        if len(self._waits) < self.size:
            return ""
        said = []
        for rank in range(self.size):
            found = self._waiting_for(rank)
            if found is None:
                return ""
            ident, request = found
            names = ", ".join(map(str, self.missing(ident)))
            said.append(f"rank {rank} waits for {request.words}, which rank {names} has not submitted")
        return "; ".join(said)

    def _waiting_for(self, rank: int) -> tuple[Ident, Request] | None:
        for ident, pending in self._pending.items():
            mine = pending.parts.get(rank)
            if mine is not None and mine.serial == self._waits[rank]:
                return ident, mine.request
        return None

    def heard_of(self) -> dict[int, int]:
        """The newest serial of each rank."""
        return dict(self._serials)

    def give_up(self, void: Mapping[int, int]) -> None:
        """After a standstill, which one rank finds and all hear of: what was submitted up to these serials, of which
        some may not be heard here yet, counts as done by all."""
        self._void = dict(void)
        self._waits.clear()
        self._joins.clear()
        for ident, pending in list(self._pending.items()):
            old = [rank for rank, one in pending.parts.items() if one.serial <= void.get(rank, 0)]
            if old:
                self._count_as_done(ident)
            for rank in old:
                del pending.parts[rank]
            pending.epoch = 0
            if not pending.parts:  # else somebody has given up already, and gone on
                del self._pending[ident]
        for pending in self._pending.values():
            for rank, one in pending.parts.items():
                self._joins[rank] = int(one.request.kind is Kind.JOIN)

    def _count_as_done(self, ident: Ident) -> None:
        members, key, count = ident
        self._counts[members, key] = max(self._counts.get((members, key), 0), count + 1)

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

    def remove_set(self, number: int) -> None:
        self.sets.pop(number, None)
