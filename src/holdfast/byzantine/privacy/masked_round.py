"""The server's side of one masked round: a pure machine. It announces, deals the buckets, and brings each to its sum.

Whoever drives it sends what it returns, hands it what clients answer, and calls `close` when a phase has lasted long
enough. Nothing that a client says raises, and `close` four times ends any round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.byzantine.agreement.canonical import digest_of, encode
from holdfast.byzantine.privacy import dealing
from holdfast.byzantine.privacy.bucket import Bucket, BucketLost, BucketSum
from holdfast.byzantine.privacy.ciphers import Expand, expand, is_public_key
from holdfast.byzantine.privacy.messages import Advertise, Announce, FromClient, Lot, Member, Phase, Send, from_client
from holdfast.byzantine.privacy.terms import Terms
from holdfast.core.errors import ConfigError, ProtocolError


@dataclass(frozen=True)
class RoundSums:
    """All that the server knows in the end. `left_out`: clients by name, each with the reason."""

    sums: tuple[BucketSum, ...]
    lost: tuple[BucketLost, ...]
    left_out: dict[str, str]
    hostile: int  # clients that have shown themselves and are in no sum


class MaskedRound:
    """`secret`: 32 bytes, drawn for this round, for the deal."""

    def __init__(
        self, round: int, clients: Sequence[str], terms: Terms, secret: bytes, *, expand: Expand = expand
    ) -> None:
        if len(set(clients)) < len(clients):
            raise ConfigError("two clients have one name", hint="names tell clients apart")
        terms.checked(len(clients))
        assert len(secret) == dealing.SECRET_BYTES
        self.round, self._terms, self._secret, self._expand = round, terms, secret, expand
        self._clients = set(clients)
        self._advertised: dict[str, Advertise] = {}
        self._left_out: dict[str, str] = {}
        self._buckets: dict[str, Bucket] = {}  # by member
        self._failed: BucketLost | None = None
        self._announcement = encode(Announce(round, dealing.commitment_to(secret), terms))
        self._about = digest_of(self._announcement)

    @property
    def phase(self) -> Phase:
        """The earliest that something waits in."""
        if self._failed is not None:
            return Phase.OVER
        return min((bucket.phase for bucket in self._all()), default=Phase.ADVERTISE)

    @property
    def outcome(self) -> RoundSums | None:
        if self.phase is not Phase.OVER:
            return None
        ended = [bucket.outcome for bucket in self._all()]
        lost = [self._failed] if self._failed else [one for one in ended if isinstance(one, BucketLost)]
        told = dict(self._left_out)
        for bucket in self._all():
            told |= bucket.left_out
        hostile = len(self._left_out) + sum(one.hostile for one in ended if one is not None)
        return RoundSums(tuple(one for one in ended if isinstance(one, BucketSum)), tuple(lost), told, hostile)

    def begin(self) -> list[Send]:
        return [Send(client, self._announcement) for client in sorted(self._clients)]

    def hear(self, client: str, content: bytes) -> list[Send]:
        """`client` is who sent it, which the transport knows."""
        if client not in self._clients or client in self._left_out:
            return []
        try:
            message = from_client(content)
        except ProtocolError as error:
            return self._leave_out(client, f"it sent {error.message}")
        if isinstance(message, Advertise):
            return self._advertise(client, message)
        bucket = self._buckets.get(client)
        return bucket.hear(client, message) if bucket else self._too_early(client, message)

    def close(self) -> list[Send]:
        """The time of the earliest phase is up: whoever has not spoken in it is lost."""
        now = self.phase
        if now is Phase.ADVERTISE:
            return self._deal()
        return [send for bucket in self._all() if bucket.phase is now for send in bucket.close()]

    # -- parts

    def _all(self) -> list[Bucket]:
        return list(dict.fromkeys(self._buckets.values()))

    def _leave_out(self, client: str, reason: str) -> list[Send]:
        bucket = self._buckets.get(client)
        if bucket is not None:
            bucket.leave_out(client, reason)
            return bucket.turn()
        self._left_out[client] = f"{client} is left out: {reason}"
        self._advertised.pop(client, None)
        return self._deal_if_all_are_here()

    def _too_early(self, client: str, message: FromClient) -> list[Send]:
        if self.phase is not Phase.ADVERTISE:
            return []  # it came too late for the deal
        return self._leave_out(client, f"it said {type(message).__name__} when it was not asked")

    def _advertise(self, client: str, message: Advertise) -> list[Send]:
        if self.phase is not Phase.ADVERTISE:
            known = self._advertised.get(client)
            return self._leave_out(client, "it advertised two sets of keys") if known not in (None, message) else []
        if self._advertised.setdefault(client, message) != message:
            return self._leave_out(client, "it advertised two sets of keys")
        keys = (message.cipher_key, message.mask_key)
        taken = {
            key for name, one in self._advertised.items() if name != client for key in (one.cipher_key, one.mask_key)
        }
        if not all(map(is_public_key, keys)) or len(message.nonce) != dealing.NONCE_BYTES:
            return self._leave_out(client, "what it advertised are no keys")
        if keys[0] == keys[1] or taken & set(keys):
            return self._leave_out(client, "it advertised a key for a second time")
        return self._deal_if_all_are_here()

    def _deal_if_all_are_here(self) -> list[Send]:
        is_complete = self._clients == self._advertised.keys() | self._left_out.keys()
        return self._deal() if is_complete and self.phase is Phase.ADVERTISE else []

    def _deal(self) -> list[Send]:
        here, least = sorted(self._advertised), self._terms.smallest * self._terms.buckets
        if len(here) < least:
            why = f"{len(here)} clients are here, and {self._terms.buckets} buckets need {least}"
            self._failed = BucketLost(tuple(here), f"the round is lost: {why}", 0)
            return []
        lots = tuple(Lot(name, self._advertised[name].nonce) for name in here)
        seed = dealing.seed_of(self._secret, self.round, {lot.client: lot.nonce for lot in lots})
        sends = []
        for number, names in enumerate(dealing.dealt(seed, here, self._terms.buckets)):
            members = [
                Member(name, self._advertised[name].cipher_key, self._advertised[name].mask_key) for name in names
            ]
            bucket = Bucket(members, self._terms, self._about, number=number, expand=self._expand)
            self._buckets |= dict.fromkeys(names, bucket)
            sends += bucket.begin(self._secret, lots)
        return sends
