"""What servers and clients send each other, what a server's machine is told (events), and what it has done (effects).

Effects are performed in order, each before the next: what is kept is on disk before what follows it is sent. That is
the whole of "votes are durable before they are sent".
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.byzantine.agreement.statements import (
    Attest,
    Claim,
    Prepared,
    Proposal,
    Record,
    Result,
    Value,
    ViewChange,
    Vote,
)

# -- messages besides the statements themselves


@dataclass(frozen=True)
class Decided:
    """For a server that has not seen that the round's value is decided."""

    value: Value
    commits: tuple[Vote, ...]


@dataclass(frozen=True)
class Ask:
    """For records from this round on. Servers that are behind ask, and clients that wait for a model."""

    round: int


@dataclass(frozen=True)
class Records:
    records: tuple[Record, ...]


@dataclass(frozen=True)
class Want:
    """The bytes with this digest."""

    digest: bytes


@dataclass(frozen=True)
class Blob:
    content: bytes


@dataclass(frozen=True)
class Submit:
    claim: Claim
    content: bytes


@dataclass(frozen=True)
class Accepted:
    round: int
    digest: bytes


@dataclass(frozen=True)
class Refused:
    """`again`: the server is not there yet; the same may be accepted later. `late`: the round goes on without it, and
    nothing else is wrong with the update."""

    round: int
    reason: str
    again: int = 0
    late: int = 0


Message = (
    Attest | Proposal | Vote | ViewChange | Result | Decided | Ask | Records | Want | Blob | Submit | Accepted | Refused
)
KINDS: dict[str, type[Message]] = {
    kind.__name__: kind
    for kind in (
        *(Attest, Proposal, Vote, ViewChange, Result, Decided, Ask, Records, Want, Blob, Submit, Accepted, Refused),
    )
}


# -- what a server has on disk


@dataclass(frozen=True)
class Ballot:
    """What this server has voted in the newest view that it took part in, and the newest value that it saw prepared."""

    round: int
    view: int = 0
    prepare: bytes = b""  # the value's digest
    commit: bytes = b""
    prepared: Prepared | None = None


@dataclass(frozen=True)
class Stored:
    """`claims`: of the updates of the round after the last record, whose bytes are there. `blobs`: all digests."""

    last: Record | None = None
    ballot: Ballot | None = None
    claims: tuple[Claim, ...] = ()
    blobs: frozenset[bytes] = frozenset()


# -- events


@dataclass(frozen=True)
class Heard:
    """`peer` is where an answer goes: a server's name, or a client's connection. What it says proves itself."""

    peer: str
    message: Message


@dataclass(frozen=True)
class Aggregated:
    """The model that a round's set comes to is on disk."""

    round: int
    model: bytes


@dataclass(frozen=True)
class Tick:
    """Some time has passed."""


Event = Heard | Aggregated | Tick


# -- effects


@dataclass(frozen=True)
class Persist:
    ballot: Ballot


@dataclass(frozen=True)
class KeepUpdate:
    claim: Claim
    content: bytes


@dataclass(frozen=True)
class KeepBlob:
    digest: bytes
    content: bytes


@dataclass(frozen=True)
class AppendRecord:
    record: Record


@dataclass(frozen=True)
class Forget:
    """Bytes that nobody needs any more."""

    digests: tuple[bytes, ...]


@dataclass(frozen=True)
class Send:
    peer: str
    message: Message


@dataclass(frozen=True)
class Broadcast:
    """To every other server."""

    message: Message


@dataclass(frozen=True)
class SendRecords:
    """Those that there are from this round on, as many as one message holds. Clients are answered in any case."""

    peer: str
    first: int


@dataclass(frozen=True)
class SendBlob:
    """If the bytes are here."""

    peer: str
    digest: bytes


@dataclass(frozen=True)
class Aggregate:
    """Combine these updates, in this order, with the model before; Aggregated follows."""

    round: int
    parent_model: bytes
    entries: tuple[Claim, ...]


@dataclass(frozen=True)
class Tell:
    what: str
    reason: str


Effect = (
    Persist
    | KeepUpdate
    | KeepBlob
    | AppendRecord
    | Forget
    | Send
    | Broadcast
    | SendRecords
    | SendBlob
    | Aggregate
    | Tell
)
