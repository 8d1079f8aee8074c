"""What participants sign, and what is made of it. Each statement knows the bytes that its signature is over (`said`).

    client   Claim        this is the digest of my update of this round
    server   Attest       of these claims I hold the updates, on disk
    leader   Proposal     this is the round's value: the attestations of 2f+1 servers, which determine the set
    server   Vote         prepare: I have taken this proposal, in this view, and no other
                          commit: I have seen 2f+1 prepares for it, and keep them
    server   ViewChange   I vote no more below this view; this is the newest value that I saw prepared
    server   Result       this is the model that the round's set comes to

A Record is a round that is over: with the votes that decided it and the results that name its model. The header is
what the next round builds on. It is the same on all servers, whichever of the signatures each of them has.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from holdfast.byzantine.agreement.canonical import digest_of, encode, pack

PREPARE, COMMIT = "prepare", "commit"
NOTHING = b""  # no digest, no signature


@dataclass(frozen=True)
class Claim:
    client: str
    round: int
    digest: bytes
    signature: bytes = NOTHING

    @cached_property
    def said(self) -> bytes:
        return pack(("claim", self.client, self.round, self.digest))


@dataclass(frozen=True)
class Attest:
    """Claims are in the order of their clients; two of one client are the proof that it signed two updates."""

    server: str
    round: int
    claims: tuple[Claim, ...]
    signature: bytes = NOTHING

    @cached_property
    def said(self) -> bytes:
        inner = tuple((one.client, one.digest, one.signature) for one in self.claims)
        return pack(("attest", self.server, self.round, inner))


@dataclass(frozen=True)
class Value:
    """What is agreed on. Everything about the set follows from it: contents.py."""

    round: int
    parent: bytes  # digest of the header before
    attests: tuple[Attest, ...]

    @cached_property
    def digest(self) -> bytes:
        return digest_of(encode(self))


@dataclass(frozen=True)
class Vote:
    phase: str
    server: str
    round: int
    view: int
    digest: bytes
    signature: bytes = NOTHING

    @cached_property
    def said(self) -> bytes:
        return pack((self.phase, self.server, self.round, self.view, self.digest))


@dataclass(frozen=True)
class Prepared:
    """A value, and the votes of one view that prepared it."""

    view: int
    value: Value
    votes: tuple[Vote, ...]


@dataclass(frozen=True)
class ViewChange:
    server: str
    round: int
    view: int
    prepared: Prepared | None
    signature: bytes = NOTHING

    @cached_property
    def said(self) -> bytes:
        prepared = None if self.prepared is None else (self.prepared.view, self.prepared.value.digest)
        return pack(("view change", self.server, self.round, self.view, prepared))


@dataclass(frozen=True)
class Proposal:
    """`changes` are what allows the leader of a later view to lead, and what binds it."""

    server: str
    round: int
    view: int
    value: Value
    changes: tuple[ViewChange, ...]
    signature: bytes = NOTHING

    @cached_property
    def said(self) -> bytes:
        return pack(("proposal", self.server, self.round, self.view, self.value.digest))


@dataclass(frozen=True)
class Header:
    round: int
    parent: bytes
    value: bytes  # digest
    model: bytes  # digest

    @cached_property
    def digest(self) -> bytes:
        return digest_of(encode(self))


@dataclass(frozen=True)
class Result:
    server: str
    header: Header
    signature: bytes = NOTHING

    @cached_property
    def said(self) -> bytes:
        return pack(("result", self.server, self.header.digest))


@dataclass(frozen=True)
class Record:
    header: Header
    value: Value
    commits: tuple[Vote, ...]
    results: tuple[Result, ...]


Statement = Claim | Attest | Vote | ViewChange | Proposal | Result
