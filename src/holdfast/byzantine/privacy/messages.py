"""What the server and a client of a masked round say to each other, in four phases. All of it in canonical bytes.

advertise: Announce -> Advertise. share: Roster -> Shares. mask: Parcels -> Masked. unmask: Survivors -> Unmask.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from holdfast.byzantine.agreement.canonical import decode
from holdfast.byzantine.privacy.terms import Terms


class Phase(IntEnum):
    ADVERTISE = 0
    SHARE = 1
    MASK = 2
    UNMASK = 3
    OVER = 4


@dataclass(frozen=True)
class Lot:
    client: str
    nonce: bytes


@dataclass(frozen=True)
class Member:
    """`cipher_key` closes parcels, `mask_key` makes masks: public keys of this round alone."""

    client: str
    cipher_key: bytes
    mask_key: bytes


@dataclass(frozen=True)
class Parcel:
    """A share that only its addressee can open. `peer`: the other side, whoever holds the message."""

    peer: str
    sealed: bytes


@dataclass(frozen=True)
class Share:
    """Of the secret of `client`; whose share it is, is whoever sends it."""

    client: str
    content: bytes


# -- from the server


@dataclass(frozen=True)
class Announce:
    round: int
    commitment: bytes
    terms: Terms


@dataclass(frozen=True)
class Roster:
    """All nonces, so that a client can deal for itself, and the members of its bucket."""

    secret: bytes
    lots: tuple[Lot, ...]
    members: tuple[Member, ...]


@dataclass(frozen=True)
class Parcels:
    parcels: tuple[Parcel, ...]


@dataclass(frozen=True)
class Survivors:
    clients: tuple[str, ...]


# -- from a client


@dataclass(frozen=True)
class Advertise:
    nonce: bytes
    cipher_key: bytes
    mask_key: bytes


@dataclass(frozen=True)
class Shares:
    """`commitment`: to the seed of its self mask, so that a wrong share is noticed."""

    commitment: bytes
    parcels: tuple[Parcel, ...]


@dataclass(frozen=True)
class Masked:
    content: bytes


@dataclass(frozen=True)
class Unmask:
    """Shares of the survivors' self masks, and of the keys of those who were lost."""

    masks: tuple[Share, ...]
    keys: tuple[Share, ...]


FromServer = Announce | Roster | Parcels | Survivors
FromClient = Advertise | Shares | Masked | Unmask
ANSWERS: dict[type[FromClient], Phase] = {
    Advertise: Phase.ADVERTISE,
    Shares: Phase.SHARE,
    Masked: Phase.MASK,
    Unmask: Phase.UNMASK,
}
_FROM_SERVER: dict[str, type[FromServer]] = {one.__name__: one for one in (Announce, Roster, Parcels, Survivors)}
_FROM_CLIENT: dict[str, type[FromClient]] = {one.__name__: one for one in ANSWERS}


def from_server(content: bytes) -> FromServer:
    return decode(content, _FROM_SERVER)


def from_client(content: bytes) -> FromClient:
    return decode(content, _FROM_CLIENT)


@dataclass(frozen=True)
class Send:
    """What a machine of the server has somebody send."""

    client: str
    content: bytes
