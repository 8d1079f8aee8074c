"""Collectives over what the members of a view hold: gather, broadcast, all-reduce. For what has no shards.

Every member calls the same one at the same place: after a step's shards, or between steps. Whoever is lost meanwhile is
done without. All members get the same bits: the first one that is there says what came of it, and whoever has heard
that says it on, so that it holds also if that one is lost. Values are what a state_dict may hold, without pickle, and
small: they travel as text. What depends on the number of members is not exact; gradients are the engine's to add.

Belongs to the thread of the training loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from holdfast.core.errors import ConfigError
from holdfast.engine.sharing import Sharing
from holdfast.membership.messages import ScriptPlace
from holdfast.state.objects import pack_object, unpack_object

BYTES_MAX = 64 * 2**20
PIECE_CHARACTERS = 2 * 2**20
OPERATIONS = ("sum", "mean")


class MeetingPlace(Protocol):
    """Where members come together in a script's lines, and who is there: see api/outside.py."""

    sharing: Sharing

    def arrive(self, what: str) -> tuple[ScriptPlace, bool]:
        """The place of this call, and whether nobody else is to be asked there."""

    def come_to(self, place: ScriptPlace, what: str) -> None:
        """Say that this member is at this call, to those who wait for it here, or in vain elsewhere."""

    def share(self, place: ScriptPlace, items: Mapping[str, Any]) -> None: ...

    def members(self) -> Sequence[str]: ...

    def me(self) -> str: ...

    def first(self, place: ScriptPlace) -> str | None:
        """The first member that is there; None: this one."""

    def wait_for(self, members: Sequence[str], place: ScriptPlace, what: str) -> None: ...

    def wait_for_all(self, place: ScriptPlace, item: str, what: str) -> None: ...


class Collectives:
    def __init__(self, meeting: MeetingPlace) -> None:
        self._meeting = meeting

    def gather(self, value: Any) -> list[Any]:
        """Every member's value, in the order of the view; the same list for all of them."""
        return list(self._agree(self.each("gather", value), "gather"))

    def all_reduce(self, tensor: torch.Tensor, operation: str = "sum") -> torch.Tensor:
        """The sum or the mean of all members' tensors, added in the order of the view."""
        if operation not in OPERATIONS:
            raise ConfigError(f"all_reduce(..., {operation!r})", hint=f"one of {', '.join(map(repr, OPERATIONS))}")
        found = self.each("all_reduce", tensor)
        total = found[0].clone()
        for one in found[1:]:
            if one.shape != tensor.shape or one.dtype != tensor.dtype:
                raise ConfigError(
                    f"all_reduce got {tensor.dtype} {tuple(tensor.shape)}, elsewhere {one.dtype} {tuple(one.shape)}",
                    hint="all members give tensors of one shape and dtype",
                )
            total += one
        if operation == "mean":
            total = total / len(found)
        result: torch.Tensor = self._agree(total, "all_reduce")
        return result

    def broadcast(self, value: Any) -> Any:
        """The first member's value."""
        return self._agree(value, "broadcast")

    def each(self, what: str, value: Any) -> list[Any]:
        """Every member's value as far as this one has heard: if one is lost meanwhile, others may have heard more."""
        text = pack_object(value, path=f"the value given to {what}", bytes_max=BYTES_MAX)
        place, alone = self._meeting.arrive(what)
        if alone:
            return [unpack_object(text)]
        self._meeting.come_to(place, what)
        self._tell(place, text)
        self._meeting.wait_for_all(place, "pieces", what)
        found = []
        for member in self._meeting.members():
            said = text if member == self._meeting.me() else self._said_by(member, place)
            if said is not None:
                found.append(unpack_object(said))
        return found

    def _agree(self, value: Any, what: str) -> Any:
        """The first member's value, or what others have heard of it."""
        own = pack_object(value, path=f"the value given to {what}", bytes_max=BYTES_MAX)
        place, alone = self._meeting.arrive(what)
        text = own if alone else None
        if not alone:
            self._meeting.come_to(place, what)
        while text is None:
            first = self._meeting.first(place)
            if first is None:
                heard = (self._said_by(member, place) for member in self._meeting.sharing.at(place))
                text = next((said for said in heard if said is not None), own)
            elif (text := self._said_by(first, place)) is None:
                self._meeting.wait_for([first], place, what)
        if not alone:
            self._tell(place, text)
            self._meeting.wait_for_all(place, "pieces", what)
        return unpack_object(text)

    def _tell(self, place: ScriptPlace, text: str) -> None:
        pieces = [text[start : start + PIECE_CHARACTERS] for start in range(0, len(text), PIECE_CHARACTERS)]
        for number, piece in enumerate(pieces):
            self._meeting.share(place, {f"p{number}": piece})
        self._meeting.share(place, {"pieces": len(pieces)})

    def _said_by(self, member: str, place: ScriptPlace) -> str | None:
        """All that it has said there; None: not all yet."""
        items = self._meeting.sharing.at(place).get(member, {})
        if "pieces" not in items:
            return None
        return "".join(str(items.get(f"p{number}", "")) for number in range(int(items["pieces"])))
