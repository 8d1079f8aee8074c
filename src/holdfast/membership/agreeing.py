"""What the members of a view say together when all of them are ready with a step. Pure.

Each says it of itself in its Ready; all hear the same, and so come to the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast.membership.messages import MARKS, Ready


@dataclass(frozen=True)
class Agreed:
    change: bool  # another view is due
    leaving: frozenset[str]
    save: bool  # a checkpoint is due, and nobody is still busy with an earlier one
    mark: int  # of that save
    stop: str  # the run stops, and why
    over: str  # the script wants no further steps, and why
    paces: dict[str, float]


def agreed(members: Sequence[str], ready: Mapping[str, Ready]) -> Agreed:
    said = [ready[member] for member in members]
    return Agreed(
        change=any(one.change or one.leaving for one in said),
        leaving=frozenset(member for member in members if ready[member].leaving),
        save=any(one.save for one in said) and not any(one.saving for one in said),
        mark=sum(one.mark for one in said) % MARKS,
        stop=next((one.stop for one in said if one.stop), ""),
        over=next((one.over for one in said if one.over), ""),
        paces={member: ready[member].pace for member in members},
    )
