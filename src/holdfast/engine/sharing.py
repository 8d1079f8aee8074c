"""What members tell each other in a script's lines outside the shards: results of an evaluation, a recorded value.

Owns what was said and heard, by place in the script: (the first step not applied, whether its mean is being applied,
loops passed, the how-manieth call there). All workers run the same script, so they come to the same places in the same
order; who is heard of at a later place, or whose shards of a later step are done, will not come to this one any more.

What was said in the last places is said again in every new view: who was left behind in one of them, and is level with
the others only then, comes to that place when they have left it. Belongs to the thread of the user's loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from holdfast.membership.codec import encode
from holdfast.membership.machine import Machine
from holdfast.membership.messages import ScriptPlace, Shared
from holdfast.net.groups import Gone, Group

FRAME_ITEMS_MAX = 4096
ITEMS_MAX = 1 << 20  # of one member at one place
PLACES_MAX = 64  # of one member
LEAVING_S = 1.0  # for what one has said that is no longer in the ledger; its host may be gone, and never close anything


class Sharing:
    """See the module."""

    def __init__(self, machine: Machine, clock: Callable[[], float]) -> None:
        self._machine = machine
        self._clock = clock
        self._left_at: dict[str, float] = {}  # when I first saw that one is no longer in the ledger
        self._said: dict[ScriptPlace, dict[str, Any]] = {}
        self._heard: dict[str, dict[ScriptPlace, dict[str, Any]]] = {}

    def say(self, place: ScriptPlace, items: Mapping[str, Any], group: Group | None) -> list[Gone]:
        """To all members, in their order: if the first one is lost meanwhile, the next of them has heard it, if any."""
        self.remember(place, items)
        if group is None:
            return []
        peers = [one for one in group.view.members if one in group.connections]
        sent = (group.send(peer, frame) for frame in _frames(place, items) for peer in peers)
        return [gone for gone in sent if gone is not None]

    def remember(self, place: ScriptPlace, items: Mapping[str, Any]) -> None:
        """For those who come to this place later, in another view."""
        for old in [one for one in self._said if one[0] < place[0] - 1]:
            del self._said[old]
        self._said.setdefault(place, {}).update(items)

    def say_again(self, group: Group) -> None:
        """A view begins: what its members may still lack."""
        for place, items in self._said.items():
            for frame in _frames(place, items):
                group.broadcast(frame, keep=True)

    def heard(self, peer: str, message: Shared) -> None:
        places = self._heard.setdefault(peer, {})
        items = places.setdefault(message.place, {})
        if len(items) < ITEMS_MAX:
            items.update(message.items)
        for old in sorted(places)[:-PLACES_MAX]:
            del places[old]

    def forget_before(self, step: int) -> None:
        for places in self._heard.values():
            for old in [one for one in places if one[0] < step - 1]:
                del places[old]

    def at(self, place: ScriptPlace) -> dict[str, dict[str, Any]]:
        """Who has said what there."""
        return {peer: places[place] for peer, places in self._heard.items() if place in places}

    def others(self) -> list[str]:
        """The other members of the view that are still there, in their order."""
        view, machine = self._machine.view, self._machine
        members = view.members if view is not None else ()
        return [one for one in members if one != machine.me and self._may_be_heard(one)]

    def _may_be_heard(self, member: str) -> bool:
        """One that has finished leaves the ledger, whose news may come before the last that it said."""
        if self._machine.is_here(member):
            self._left_at.pop(member, None)
            return True
        now = self._clock()
        return self._machine.is_connected(member) and now - self._left_at.setdefault(member, now) < LEAVING_S

    def has_passed(self, peer: str, place: ScriptPlace) -> bool:
        """That one has come further than this place, and so will not come to it."""
        if self._machine.others.has_gone_on(peer, place[0] + place[1]):
            return True
        if place[1] and self._machine.others.has_applied(peer, place[0]):
            return True  # what it said there it has said again, before it said where it stands
        return any(other > place for other in self._heard.get(peer, ()))


def _frames(place: ScriptPlace, items: Mapping[str, Any]) -> Iterator[bytes]:
    pairs = list(items.items())
    for start in range(0, max(1, len(pairs)), FRAME_ITEMS_MAX):
        yield encode(Shared(place, tuple(pairs[start : start + FRAME_ITEMS_MAX])))
