"""How ranks become one worker: the room that each needs, a digest of all their states, and one file for their sums.

Owns nothing. Rank 0 makes the file and hands its descriptor to the others.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from holdfast.core.words import Registration
from holdfast.engine.ranks.link import Link, Links
from holdfast.placement.ranks import ranks_here
from holdfast.reduce.arena import Arena

JOIN_S = 300.0  # ranks that build the same model come to holdfast.join at nearly the same time
SOCKET_SUFFIX = ".sock"


@dataclass(frozen=True)
class Formed:
    """What all ranks of a group know alike."""

    slot_bytes: int  # the most that one of them needs
    digest: str  # of all their states


def form(slot_bytes: int, digest: str) -> Formed:
    """Alone, this is what was given."""
    here = ranks_here()
    if here.count == 1:
        return Formed(slot_bytes, digest)
    if here.rank:
        link = Link(here.links[0])
        link.send("part", slot_bytes, digest)
        return Formed(*link.expect("formed", JOIN_S))
    links = Links(here.links)
    parts = [(slot_bytes, digest), *links.hear("part", JOIN_S)]
    together = hashlib.blake2b("".join(part for _, part in parts).encode(), digest_size=16).hexdigest()
    formed = Formed(max(size for size, _ in parts), together)
    links.tell("formed", formed.slot_bytes, formed.digest)
    return formed


def make_arena(slots: int, slot_bytes: int) -> Arena:
    """This rank's part of the group's memory file."""
    here = ranks_here()
    if here.rank == 0:
        arena = Arena.create(slots, slot_bytes, parts=here.count)
        Links(here.links).tell("arena", arena.slot_bytes, fd=arena.fd)
        return arena
    exact, fd = Link(here.links[0]).expect("arena", JOIN_S)
    return Arena(fd, slots, exact, part=here.rank, parts=here.count)


def socket_of_rank(path: str, rank: int) -> str:
    """Where a rank listens for the same rank of other groups: beside the socket of its worker, which is rank 0's."""
    return f"{path.removesuffix(SOCKET_SUFFIX)}-{rank}{SOCKET_SUFFIX}" if rank else path


def of_rank(registration: Registration, rank: int) -> Registration:
    return replace(registration, address=socket_of_rank(registration.address, rank))
