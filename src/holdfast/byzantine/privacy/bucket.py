"""The server's side of one bucket's masked sum: a pure machine. It is told what clients say and that a phase is over.

A member that says nothing in a phase is lost to the bucket, and one that says what no correct client says is left out
in the same way, with a sentence. As long as the threshold's number of members answer, the sum of those who sent their
numbers is found; otherwise the bucket is lost, with a sentence, and nothing else is.

`hostile` counts members that have shown themselves and are in no sum: each was one of the f that the rule across
buckets must bear. One that shows itself after its numbers have arrived stays in its bucket's sum with whatever these
are, since the others' masks open that sum only: the rule must still bear it, and it is not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.byzantine.agreement.canonical import encode
from holdfast.byzantine.privacy.ciphers import TAG_BYTES, Expand, KeyPair, commitment_to, expand
from holdfast.byzantine.privacy.client import pair_mask_key, self_mask_key
from holdfast.byzantine.privacy.fixed_point import Residues
from holdfast.byzantine.privacy.masks import mask_from, unmasked
from holdfast.byzantine.privacy.messages import (
    ANSWERS,
    FromClient,
    Lot,
    Masked,
    Member,
    Parcel,
    Parcels,
    Phase,
    Roster,
    Send,
    Share,
    Shares,
    Survivors,
    Unmask,
)
from holdfast.byzantine.privacy.sharing import SHARE_BYTES, recovered
from holdfast.byzantine.privacy.terms import Terms

COMMITMENT_BYTES = 32


@dataclass(frozen=True, eq=False)
class BucketSum:
    """`total`: of the numbers of `clients`, exactly. Nobody else's are in it."""

    clients: tuple[str, ...]
    total: Residues
    hostile: int


@dataclass(frozen=True)
class BucketLost:
    members: tuple[str, ...]
    reason: str
    hostile: int


class Bucket:
    def __init__(
        self, members: Sequence[Member], terms: Terms, about: bytes, *, number: int, expand: Expand = expand
    ) -> None:
        self.phase = Phase.SHARE
        self.outcome: BucketSum | BucketLost | None = None
        self.left_out: dict[str, str] = {}  # why
        self._members = {member.client: member for member in members}
        self._numbers = {name: number for number, name in enumerate(self._members)}  # of shares
        self._terms, self._about, self._number, self._expand = terms, about, number, expand
        self._threshold = terms.threshold(len(members))
        self._expected = set(self._members)  # in this phase
        self._shares: dict[str, Shares] = {}
        self._masked: dict[str, Masked] = {}
        self._unmask: dict[str, Unmask] = {}

    @property
    def members(self) -> tuple[str, ...]:
        return tuple(self._members)

    def begin(self, secret: bytes, lots: tuple[Lot, ...]) -> list[Send]:
        content = encode(Roster(secret, lots, tuple(self._members.values())))
        return [Send(name, content) for name in self._members]

    def hear(self, client: str, message: FromClient) -> list[Send]:
        """What is to be sent now. Nothing that a client says raises."""
        if self.phase is Phase.OVER or client in self.left_out or ANSWERS[type(message)] < self.phase:
            return []  # too late; it was counted as lost already
        heard = self._heard()
        if client in heard:
            if heard[client] != message:
                self.leave_out(client, "it said two different things in one phase")
        elif client not in self._expected or ANSWERS[type(message)] is not self.phase:
            self.leave_out(client, f"it said {type(message).__name__} when it was not asked")
        elif wrong := self._wrong(client, message):
            self.leave_out(client, wrong)
        else:
            heard[client] = message
        return self.turn()

    def leave_out(self, client: str, reason: str) -> None:
        self.left_out[client] = f"{client} is left out: {reason}"
        self._expected.discard(client)
        self._heard().pop(client, None)

    def close(self) -> list[Send]:
        """The phase's time is up."""
        self._expected &= self._heard().keys()
        return self.turn()

    # -- what is accepted

    def _heard(self) -> dict[str, FromClient]:
        kinds: dict[Phase, dict[str, FromClient]] = {
            Phase.SHARE: self._shares,  # type: ignore[dict-item]
            Phase.MASK: self._masked,  # type: ignore[dict-item]
            Phase.UNMASK: self._unmask,  # type: ignore[dict-item]
        }
        return kinds.get(self.phase, {})

    def _wrong(self, client: str, message: FromClient) -> str:
        """What no correct client would have sent; empty if there is no such thing to be seen."""
        if isinstance(message, Shares):
            others = [name for name in self._members if name != client]
            sizes = {len(parcel.sealed) for parcel in message.parcels}
            if [parcel.peer for parcel in message.parcels] != others or sizes != {2 * SHARE_BYTES + TAG_BYTES}:
                return "its shares are not one for every other member"
            return "" if len(message.commitment) == COMMITMENT_BYTES else "its commitment is none"
        if isinstance(message, Masked):
            length, right = len(message.content), self._terms.content_bytes
            return "" if length == right else f"its masked numbers have {length} bytes, and must have {right}"
        assert isinstance(message, Unmask)
        lost = self._shares.keys() - self._masked.keys()
        if not _is_for(message.masks, set(self._masked)) or not _is_for(message.keys, lost):
            return "its shares are not those that it was asked for"
        return ""

    # -- phases

    def turn(self) -> list[Send]:
        """To the next phase, if everybody who is expected has spoken."""
        if self.phase is Phase.OVER or not self._expected <= self._heard().keys():
            return []
        here = len(self._heard())
        if here < self._threshold:
            return self._lose(
                f"{here} of {len(self._members)} are left to {self._doing()}, and {self._threshold} must be"
            )
        self._expected = set(self._heard())
        self.phase = Phase(self.phase + 1)
        if self.phase is Phase.MASK:
            return [Send(name, encode(Parcels(self._parcels_for(name)))) for name in sorted(self._expected)]
        if self.phase is Phase.UNMASK:
            content = encode(Survivors(tuple(sorted(self._masked))))
            return [Send(name, content) for name in sorted(self._expected)]
        return self._finish()

    def _doing(self) -> str:
        return {Phase.SHARE: "share keys", Phase.MASK: "send numbers", Phase.UNMASK: "open the sum"}[self.phase]

    def _parcels_for(self, name: str) -> tuple[Parcel, ...]:
        return tuple(
            Parcel(sender, parcel.sealed)
            for sender, shares in sorted(self._shares.items())
            for parcel in shares.parcels
            if parcel.peer == name
        )

    def _lose(self, why: str, hostile: int = 0) -> list[Send]:
        self.phase = Phase.OVER
        known = "".join(f"; {reason}" for reason in self.left_out.values())
        self.outcome = BucketLost(
            self.members, f"bucket {self._number} is lost: {why}{known}", max(hostile, len(self.left_out))
        )
        return []

    def _finish(self) -> list[Send]:
        survivors = sorted(self._masked)
        lost = sorted(self._shares.keys() - self._masked.keys())
        seeds = {name: self._self_seed(name) for name in survivors}
        pairs = {name: self._key_pair(name) for name in lost}
        for name, secret in (*seeds.items(), *pairs.items()):
            if secret is None:
                what = "self mask" if name in seeds else "key"
                return self._lose(f"the {what} of {name} cannot be opened, so a member lied about its shares", 1)
        total = unmasked(
            (self._terms.encoding.from_bytes(self._masked[name].content) for name in survivors),
            (self._mask(self_mask_key(seed, self._about, name)) for name, seed in seeds.items() if seed is not None),
            (
                (name, gone, self._mask(pair_mask_key(pair, self._about, self._members[name])))
                for gone, pair in pairs.items()
                for name in survivors
                if pair is not None
            ),
            self._terms,
        )
        self.outcome = BucketSum(tuple(survivors), total, len(self.left_out.keys() - self._masked.keys()))
        return []

    def _mask(self, key: bytes) -> Residues:
        return mask_from(key, self._terms, self._expand)

    def _self_seed(self, name: str) -> bytes | None:
        shares = self._given(name, keys=False)
        right = self._shares[name].commitment
        return recovered(shares, self._threshold, lambda seed: commitment_to(seed, self._about, name) == right)

    def _key_pair(self, name: str) -> KeyPair | None:
        right = self._members[name].mask_key
        seed = recovered(self._given(name, keys=True), self._threshold, lambda one: KeyPair(one).public == right)
        return None if seed is None else KeyPair(seed)

    def _given(self, of: str, *, keys: bool) -> dict[int, bytes]:
        """Shares of one member's secret, by the number of who gave them."""
        return {
            self._numbers[giver]: share.content
            for giver, unmask in self._unmask.items()
            for share in (unmask.keys if keys else unmask.masks)
            if share.client == of
        }


def _is_for(shares: tuple[Share, ...], clients: set[str]) -> bool:
    names = [share.client for share in shares]
    return (
        len(set(names)) == len(names)
        and set(names) <= clients
        and all(len(share.content) == SHARE_BYTES for share in shares)
    )
