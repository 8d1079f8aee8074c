"""Who can reach whom, and who is left out when not everybody can: pure functions.

A network may be cut between workers that all still reach the ledger. No lease runs out then, and a view of the same
members would fail again and again. So a member whose view failed knocks at all the others (connects, proves itself,
hangs up) and, if some do not answer, says so in the ledger under its lease: its roll. The proposer reads the rolls
and leaves out the fewest members, so that everyone who is left can reach everyone else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from holdfast.core.errors import ProtocolError
from holdfast.core.words import decode_json, encode_json, host_of

PEERS_MAX = 4096

Pair = tuple[str, str]  # in rank order: the second dials the first


@dataclass(frozen=True, slots=True)
class Roll:
    """What a member found when it knocked at the others. It has given up the group of `view`."""

    view: int
    reached: tuple[str, ...] = ()
    missed: tuple[str, ...] = ()
    has_state: bool = False  # of the training; the state must not be lost with those that are left out

    def encode(self) -> bytes:
        fields = {"view": self.view, "reached": self.reached, "missed": self.missed, "has_state": self.has_state}
        return encode_json(fields)

    @classmethod
    def decode(cls, data: bytes) -> Roll:
        fields = decode_json(data)
        view, has_state = fields.get("view"), fields.get("has_state")
        if type(view) is not int or type(has_state) is not bool:
            raise ProtocolError(f"not a roll: {data[:80]!r}")
        return cls(view, _peers(fields.get("reached")), _peers(fields.get("missed")), has_state)


def _peers(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > PEERS_MAX or not all(isinstance(peer, str) for peer in value):
        raise ProtocolError(f"a roll that names {str(value)[:80]!r}")
    return tuple(value)


def severed(members: Sequence[str], rolls: Mapping[str, Roll]) -> frozenset[Pair]:
    """The pairs of members that cannot be connected, as far as the rolls tell.

    A roll may be missing: its writer's loop computes. So what one pair of workers says of two hosts holds for all
    pairs between these, unless another pair says the opposite.
    """
    verdicts = {pair: _reaches(*pair, rolls) for pair in combinations(members, 2)}
    pairs = {pair for pair, reaches in verdicts.items() if reaches is False}
    cut = {_hosts(pair) for pair in pairs} - {_hosts(pair) for pair, reaches in verdicts.items() if reaches}
    apart = {hosts for hosts in cut if len(hosts) == 2}
    return frozenset(pairs | {pair for pair in verdicts if _hosts(pair) in apart})


def _hosts(pair: Pair) -> frozenset[str]:
    return frozenset(map(host_of, pair))


def _reaches(first: str, second: str, rolls: Mapping[str, Roll]) -> bool | None:
    """What the newer roll of the two says; of two equally new ones that of the second, since it dials the first."""
    said: list[tuple[int, int, bool]] = []
    for order, (who, peer) in enumerate(((first, second), (second, first))):
        roll = rolls.get(who)
        if roll is not None and (peer in roll.reached or peer in roll.missed):
            said.append((roll.view, order, peer in roll.reached))
    return max(said)[2] if said else None


def separate(members: Sequence[str], pairs: Iterable[Pair], newcomers: frozenset[str]) -> tuple[str, ...]:
    """Who is left out, in rank order, so that no pair is left: newcomers before others, and as few as possible.

    The one in most pairs goes first, the later in rank where that is equal. Everyone computes the same.
    """
    left = set(pairs)
    out = _cover([member for member in members if member not in newcomers], left)
    kept = [member for member in members if member not in newcomers and member not in out]
    late = [member for member in members if member in newcomers]
    out |= {one for one in late if any((other, one) in left or (one, other) in left for other in kept)}
    out |= _cover([member for member in late if member not in out], left)
    return tuple(member for member in members if member in out)


def _cover(members: Sequence[str], pairs: set[Pair]) -> set[str]:
    """Members to leave out of these, so that no pair among them is left."""
    left = {pair for pair in pairs if pair[0] in members and pair[1] in members}
    out: set[str] = set()
    inside = set(left)
    while inside:
        counts = {member: sum(member in pair for pair in inside) for member in members}
        worst = max(range(len(members)), key=lambda rank: (counts[members[rank]], rank))
        out.add(members[worst])
        inside = {pair for pair in inside if members[worst] not in pair}
    for member in members:  # taking them one by one may have taken one too many
        if member in out and not any(member in pair and not (set(pair) - {member}) & out for pair in left):
            out.remove(member)
    return out
