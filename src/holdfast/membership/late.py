"""Who has been left behind, for how long one is waited for, and who may come back: the rules. Pure.

A member that is late with its shards holds up all the others, who have done theirs. After a while they go on without
it: the next view has the others only, they compute its shards too, and the step is reduced without it. It is a soft
judgement. Who is wrongly taken for late costs a little speed and never exactness: nothing of it is counted twice,
since what was said in one view is not listened to in the next.

Who was left behind is not lost. The view names it (`View.late`, with the number of the view that left it behind). Its
registration may stand all the while, so that alone does not make it a joiner: its loop may still be inside a step of
long ago. It is one when its roll says that it has seen a view which left it behind; it says so only when it has given
up its state. Nobody that is still a member can have said so: its roll would be of an earlier view.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from holdfast.core.words import View
from holdfast.membership.reach import Roll

if TYPE_CHECKING:
    from holdfast.membership.view_rules import LedgerState

STEPS_MIN: Final = 5  # in a view, by all its members: before that nobody knows what is usual
TIMES: Final = 3.0  # as long as the step's shards should take
LATE_MAX: Final = 256  # whom a view names; of more, the last
KEEPERS: Final = 2  # members that keep the mean for those left behind
KEEP_S: Final = 30.0  # they do so for so long, and at least for KEEP_TIMES as long as the step's shards should take
KEEP_TIMES: Final = 20.0
AGAIN_S: Final = 0.1  # between two times that one asks for that mean
SPENT: Final = "spent"  # for a digest: what is in memory is not what the run began with
CATCH_UP_S: Final = 10.0  # then it will not come


def not_back(ledger: LedgerState) -> frozenset[str]:
    """Those that were left behind and have not said that they know."""
    view = ledger.view
    return (
        frozenset(id for id, number in view.late if not _is_back(ledger.rolls.get(id), number)) if view else frozenset()
    )


def _is_back(roll: Roll | None, left_by: int) -> bool:
    return roll is not None and roll.view >= left_by and not roll.has_state


def still_late(ledger: LedgerState, members: Collection[str], newly: Sequence[str] = ()) -> tuple[tuple[str, int], ...]:
    """Whom the next view, of these members, names: those of this one that are not in it and live, and `newly`."""
    view = ledger.view
    if view is None:
        return ()
    names = dict(view.late) | dict.fromkeys(newly, view.number + 1)
    left = [(id, number) for id, number in names.items() if id not in members and id not in ledger.dead]
    return tuple(left[-LATE_MAX:])


def patience_s(least_s: float, *, expected_s: float, own_s: float) -> float:
    """How long to wait for those whose shards are missing, after all others are done.

    `expected_s`: what the step's shards take the slowest by its pace. `own_s`: what this step took me since the last
    one was committed. An evaluation between two steps takes everybody about as long as it took me.
    """
    return max(least_s, TIMES * expected_s, own_s)


def who_is_late(
    view: View, ready: Collection[str], paces: Mapping[str, float], shares: Mapping[str, Sequence[int]]
) -> tuple[str, ...]:
    """The members whose shards are missing; nobody where one of them has no history: its first take what they take."""
    missing = tuple(member for member in view.members if member not in ready)
    known = all(paces.get(member, 0.0) > 0 or not shares.get(member) for member in missing)
    return missing if known else ()
