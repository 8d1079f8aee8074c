"""A client's side of one masked round: a pure machine. It is told what the server says, and says what to answer.

It trusts the server to add up and no more: every message is checked before a secret is touched, the same message gets
the same answer, and another one in its place gets none. ProtocolError says in one sentence what no correct server does;
the client then takes no further part in the round. It gives away its share of a peer's self mask if the peer arrived
and of the peer's key if it was lost, never both, and nothing unless enough have arrived.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from holdfast.byzantine.agreement.canonical import decode, digest_of, encode
from holdfast.byzantine.privacy import dealing
from holdfast.byzantine.privacy.ciphers import Expand, KeyPair, Secrets, commitment_to, derived, expand, opened, seal
from holdfast.byzantine.privacy.fixed_point import Residues
from holdfast.byzantine.privacy.masks import mask_from, masked
from holdfast.byzantine.privacy.messages import (
    Advertise,
    Announce,
    FromClient,
    FromServer,
    Masked,
    Member,
    Parcel,
    Parcels,
    Phase,
    Roster,
    Share,
    Shares,
    Survivors,
    Unmask,
    from_server,
)
from holdfast.byzantine.privacy.sharing import SHARE_BYTES, split
from holdfast.byzantine.privacy.terms import Terms
from holdfast.core.errors import ConfigError, ProtocolError

_EXPECTED: dict[Phase, type[FromServer]] = {
    Phase.ADVERTISE: Announce,
    Phase.SHARE: Roster,
    Phase.MASK: Parcels,
    Phase.UNMASK: Survivors,
}


@dataclass(frozen=True)
class KeptSecrets:
    """All of a client between two messages. As secret as its keys."""

    name: str
    round: int
    terms: Terms
    secrets: Secrets
    phase: int
    ended: str
    about: bytes
    commitment: bytes
    members: tuple[Member, ...]
    own: tuple[bytes, ...]
    parcels: tuple[Parcel, ...]


class MaskedClient:
    """For one round. `secrets` are drawn for it and used once."""

    def __init__(self, name: str, round: int, terms: Terms, secrets: Secrets, *, expand: Expand = expand) -> None:
        self.name, self.round, self.terms = name, round, terms
        self.phase = Phase.ADVERTISE  # whose message is due
        self._secrets, self._expand = secrets, expand
        self._cipher, self._mask = KeyPair(secrets.cipher_seed), KeyPair(secrets.mask_seed)
        self._values: Residues | None = None
        self._answers: dict[bytes, bytes] = {}
        self._ended = ""
        self._about = b""  # the announcement's digest: every key is of this round and these terms
        self._commitment = b""  # the server's, to its secret
        self._members: dict[str, Member] = {}
        self._own: tuple[bytes, bytes] = (b"", b"")  # its own shares of its mask seed and its self seed
        self._parcels: dict[str, bytes] = {}

    @property
    def members(self) -> tuple[str, ...]:
        """Of its bucket, once it was told."""
        return tuple(self._members)

    def contribute(self, values: Residues) -> None:
        """What it adds to the sum, as Encoding.encode has made it. Due before the parcels arrive."""
        if values.shape != (self.terms.numbers,):
            raise ConfigError(
                f"an update has {values.shape} numbers, and the round's have {self.terms.numbers}",
                hint="flatten the update of the round's model",
            )
        self._values = values

    def hear(self, content: bytes) -> bytes:
        """The answer. The same again for the same message."""
        digest = digest_of(content)
        if digest in self._answers:
            return self._answers[digest]
        if self._ended:
            self._refuse(self._ended)
        try:
            message = from_server(content)
        except ProtocolError as error:
            self._refuse(f"the server sent {error.message}")
        if type(message) is not _EXPECTED.get(self.phase):
            self._refuse(f"the server said {type(message).__name__} for a second time, and differently, or too early")
        answer = encode(self._answer(message, digest))
        self.phase = Phase(self.phase + 1)
        self._answers[digest] = answer
        return answer

    def _answer(self, message: FromServer, digest: bytes) -> FromClient:
        if isinstance(message, Announce):
            return self._advertise(message, digest)
        if isinstance(message, Roster):
            return self._share(message)
        if isinstance(message, Parcels):
            return self._masked(message)
        return self._unmask(message)

    # -- for processes that live as long as one message

    def kept(self) -> bytes:
        """What `restored` goes on with. Answers are not in it: a message that comes again is refused."""
        parcels = tuple(Parcel(peer, sealed) for peer, sealed in self._parcels.items())
        return encode(
            KeptSecrets(
                self.name,
                self.round,
                self.terms,
                self._secrets,
                int(self.phase),
                self._ended,
                self._about,
                self._commitment,
                tuple(self._members.values()),
                self._own,
                parcels,
            )
        )

    @classmethod
    def restored(cls, content: bytes, *, expand: Expand = expand) -> MaskedClient:
        """ProtocolError for what `kept` has not made."""
        kept = decode(content, {KeptSecrets.__name__: KeptSecrets})
        if kept.phase not in tuple(Phase) or len(kept.own) != 2:
            raise ProtocolError("not what a client keeps of a round")
        client = cls(kept.name, kept.round, kept.terms, kept.secrets, expand=expand)
        client.phase, client._ended = Phase(kept.phase), kept.ended
        client._about, client._commitment = kept.about, kept.commitment
        client._members = {member.client: member for member in kept.members}
        client._own = (kept.own[0], kept.own[1])
        client._parcels = {parcel.peer: parcel.sealed for parcel in kept.parcels}
        return client

    # -- the four phases

    def _advertise(self, message: Announce, digest: bytes) -> Advertise:
        if (message.round, message.terms) != (self.round, self.terms):
            self._refuse(f"the server announced round {message.round} on other terms than were agreed on")
        self._about, self._commitment = digest, message.commitment
        return Advertise(self._secrets.nonce, self._cipher.public, self._mask.public)

    def _share(self, message: Roster) -> Shares:
        self._check_deal(message)
        self._check_members(message.members)
        names = [member.client for member in message.members]
        self._members = dict(zip(names, message.members, strict=True))
        threshold = self.terms.threshold(len(names))
        pieces = zip(
            split(self._secrets.mask_seed, threshold, len(names)),
            split(self._secrets.self_seed, threshold, len(names)),
            strict=True,
        )
        parcels = []
        for name, pair in zip(names, pieces, strict=True):
            if name == self.name:
                self._own = pair
            else:
                parcels.append(Parcel(name, seal(self._parcel_key(name), self.name, name, b"".join(pair))))
        return Shares(commitment_to(self._secrets.self_seed, self._about, self.name), tuple(parcels))

    def _masked(self, message: Parcels) -> Masked:
        names = [parcel.peer for parcel in message.parcels]
        if len(set(names)) < len(names) or not set(names) <= self._members.keys() - {self.name}:
            self._refuse("the server sent parcels twice, or of clients that are not of the bucket")
        if len(names) + 1 < self.terms.threshold(len(self._members)):
            self._refuse(f"the server sent parcels of {len(names)} peers, which are too few to hide among")
        if self._values is None:
            raise ConfigError(f"{self.name} has no update to mask", hint="call contribute before the parcels arrive")
        self._parcels = {parcel.peer: parcel.sealed for parcel in message.parcels}
        self_mask = mask_from(self_mask_key(self._secrets.self_seed, self._about, self.name), self.terms, self._expand)
        pair_masks = [
            (name, mask_from(pair_mask_key(self._mask, self._about, self._members[name]), self.terms, self._expand))
            for name in sorted(names)
        ]
        return Masked(self.terms.encoding.to_bytes(masked(self._values, self_mask, self.name, pair_masks)))

    def _unmask(self, message: Survivors) -> Unmask:
        there = set(message.clients)
        if len(there) < len(message.clients) or not there <= self._parcels.keys() | {self.name}:
            self._refuse("the server named survivors twice, or some that sent no shares")
        if self.name not in there:
            self._refuse(f"the server wants help to open a sum without {self.name}, which has sent its part of it")
        if len(there) < self.terms.threshold(len(self._members)):
            self._refuse(f"the server wants to open a sum of {len(there)}, which are too few to hide among")
        pairs = {name: pair for name in self._members if (pair := self._pair_of(name)) is not None}
        return Unmask(
            tuple(Share(name, pair[1]) for name, pair in pairs.items() if name in there),
            tuple(Share(name, pair[0]) for name, pair in pairs.items() if name not in there),
        )

    # -- parts

    def _check_deal(self, message: Roster) -> None:
        nonces = {lot.client: lot.nonce for lot in message.lots}
        if dealing.commitment_to(message.secret) != self._commitment:
            self._refuse("the server dealt with another secret than it had committed to")
        if len(nonces) < len(message.lots) or nonces.get(self.name) != self._secrets.nonce:
            self._refuse(f"the server dealt without the nonce of {self.name}, or with a client twice")
        seed = dealing.seed_of(message.secret, self.round, nonces)
        mine = next(bucket for bucket in dealing.dealt(seed, nonces, self.terms.buckets) if self.name in bucket)
        if mine != tuple(member.client for member in message.members):
            self._refuse("the server's bucket is not the one that the seed deals")

    def _check_members(self, members: tuple[Member, ...]) -> None:
        own = Member(self.name, self._cipher.public, self._mask.public)
        keys = [key for member in members for key in (member.cipher_key, member.mask_key)]
        if own not in members or len(set(keys)) < len(keys):
            self._refuse(f"the server changed the keys of {self.name}, or two members have one key")
        if len(members) < self.terms.smallest:
            self._refuse(f"the server dealt a bucket of {len(members)}, whose sum hides nothing")

    def _parcel_key(self, peer: str) -> bytes:
        try:
            return self._cipher.agree(self._members[peer].cipher_key, "parcel", self._about)
        except ProtocolError:
            self._refuse(f"the server sent a public key of {peer} that is none")

    def _pair_of(self, name: str) -> tuple[bytes, bytes] | None:
        """Shares of the mask seed and the self seed. None: there was no parcel, or it cannot be opened."""
        if name == self.name:
            return self._own
        if name not in self._parcels:
            return None
        content = opened(self._parcel_key(name), name, self.name, self._parcels[name])
        if content is None or len(content) != 2 * SHARE_BYTES:
            return None
        return content[:SHARE_BYTES], content[SHARE_BYTES:]

    def _refuse(self, sentence: str) -> NoReturn:
        self._ended = sentence
        raise ProtocolError(sentence, hint=f"{self.name} takes no further part in round {self.round}")


def self_mask_key(seed: bytes, about: bytes, client: str) -> bytes:
    return derived(seed, "self mask", about, client)


def pair_mask_key(own: KeyPair, about: bytes, peer: Member) -> bytes:
    return own.agree(peer.mask_key, "pair mask", about)
