"""Clients of a masked round in one process, some of which fall silent or say something else than they should."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import numpy as np

from holdfast.byzantine.agreement.canonical import encode
from holdfast.byzantine.privacy.ciphers import Expand, Secrets, expand
from holdfast.byzantine.privacy.client import MaskedClient
from holdfast.byzantine.privacy.exchange import carried
from holdfast.byzantine.privacy.fixed_point import Encoding, Residues
from holdfast.byzantine.privacy.masked_round import MaskedRound, RoundSums
from holdfast.byzantine.privacy.messages import FromClient, Phase, from_client
from holdfast.byzantine.privacy.terms import Terms

Tamper = Callable[[Phase, FromClient], FromClient | bytes | None]
SECRET = bytes(32)
NUMBERS = 6


def names(count: int) -> list[str]:
    return [f"c{number:02}" for number in range(count)]


def terms(clients: int, buckets: int = 1, *, colluding: int = 0, numbers: int = NUMBERS, bits: int = 32) -> Terms:
    return Terms(buckets, numbers, Encoding.fitting(8.0, -(-clients // buckets), bits), colluding).checked(clients)


def secrets(name: str, draw: int = 0) -> Secrets:
    """The same for the same name and draw."""
    parts = [hashlib.sha256(f"{name} {draw} {number}".encode()).digest()[:16] for number in range(4)]
    return Secrets(*parts)


def values(agreed: Terms, name: str, draw: int = 0) -> Residues:
    seed = int.from_bytes(hashlib.sha256(f"{name} {draw}".encode()).digest()[:4], "big")
    return agreed.encoding.encode(np.random.default_rng(seed).normal(size=agreed.numbers))


class Party:
    """A client. `silent_from`: it says nothing in this phase and later. `tamper`: what it says instead."""

    def __init__(
        self, client: MaskedClient, silent_from: Phase = Phase.OVER, tamper: Tamper = lambda phase, said: said
    ) -> None:
        self.client, self._silent_from, self._tamper = client, silent_from, tamper

    def hear(self, content: bytes) -> bytes | None:
        phase = self.client.phase
        if phase >= self._silent_from:
            return None
        said = self._tamper(phase, from_client(self.client.hear(content)))
        return said if said is None or isinstance(said, bytes) else encode(said)


def parties(
    agreed: Terms,
    clients: list[str],
    *,
    silent: Mapping[str, Phase] | None = None,
    tampering: Mapping[str, Tamper] | None = None,
    draw: int = 0,
    expand: Expand = expand,
    updates: Mapping[str, Residues] | None = None,
) -> dict[str, Party]:
    made = {}
    for name in clients:
        client = MaskedClient(name, 1, agreed, secrets(name, draw), expand=expand)
        client.contribute(updates[name] if updates else values(agreed, name))
        made[name] = Party(
            client, (silent or {}).get(name, Phase.OVER), (tampering or {}).get(name, lambda phase, said: said)
        )
    return made


def run(
    agreed: Terms,
    clients: list[str],
    *,
    silent: Mapping[str, Phase] | None = None,
    tampering: Mapping[str, Tamper] | None = None,
) -> RoundSums:
    made = parties(agreed, clients, silent=silent, tampering=tampering)
    return carried(MaskedRound(1, clients, agreed, SECRET), made)


def total(agreed: Terms, clients: list[str] | tuple[str, ...]) -> list[int]:
    """What the sum of these clients' numbers must be."""
    found = sum(values(agreed, name) for name in clients)
    assert not isinstance(found, int)
    return [int(one) for one in found]


def assert_sums(found: RoundSums, agreed: Terms) -> None:
    """Every sum that there is, is that of its clients' numbers, to the unit."""
    for one in found.sums:
        assert [int(number) for number in one.total] == total(agreed, one.clients)
