"""Who forms the next world of ranks: pure decisions over what the ledger says.

A world is a view. Its members go on to the next one together: when one is lost, or when all have agreed to take
newcomers in. Who was a member keeps its place before who was not, so that rank 0 has the state if anybody has.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from holdfast.core.words import View
from holdfast.membership.view_rules import LedgerState

START_WAIT_S = 30.0  # for the other workers of a new run
GRACE_S = 0.3  # for the ledger to say whether a member died whose connection broke


@dataclass(frozen=True, kw_only=True)
class WorldStanding:
    """Where this worker stands. `left`: the number of the last world that it was in. `lost`: whose connections broke
    there. `waited_s`: since it began to look for the next one. `least`: ranks without which no world is formed."""

    me: str
    left: int = 0
    lost: frozenset[str] = frozenset()
    waited_s: float = 0.0
    least: int = 1


@dataclass(frozen=True)
class Move:
    """What to do now, and why: enter a view, propose one, end, or wait."""

    reason: str
    enter: View | None = None
    propose: View | None = None
    end: bool = False


def next_move(state: LedgerState, standing: WorldStanding) -> Move:
    view, me = state.view, standing.me
    if state.stop:
        return Move(f"the run is asked to stop: {state.stop}", end=True)
    if state.done:
        return Move("the run is finished", end=True)
    if view is not None and view.number > standing.left and me in view.members:
        return Move(view.reason, enter=view)
    if me not in state.ids:
        return Move("the ledger does not show this worker yet")
    members = () if view is None else tuple(member for member in view.members if member in state.ids)
    if view is not None and members and (me not in view.members or view.number > standing.left):
        return Move(f"waiting for {members[0]} and the other members to take this worker in")
    return _propose(state, standing, members)


def _propose(state: LedgerState, standing: WorldStanding, members: tuple[str, ...]) -> Move:
    number = state.view.number + 1 if state.view is not None else 1
    unsure = sorted(standing.lost & set(members))
    if unsure and standing.waited_s < GRACE_S:
        return Move(f"waiting for the ledger to say what became of {', '.join(unsure)}")
    new = [worker.id for worker in state.registered if worker.id in state.ids and worker.id not in members]
    chosen = (*members, *new)[: max(state.size, len(members))]
    if len(chosen) < standing.least:
        return Move(f"{len(chosen)} workers are there, and {standing.least} are needed")
    if not members and len(chosen) < state.size and standing.waited_s < START_WAIT_S:
        return Move(f"{len(chosen)} of {state.size} workers are there")
    was = state.view.members if state.view is not None else ()
    return Move("", propose=View(number, chosen, _why(was, chosen)))


def _why(was: tuple[str, ...], chosen: tuple[str, ...]) -> str:
    gone, new = [one for one in was if one not in chosen], [one for one in chosen if one not in was]
    if not was:
        return "the run begins"
    said = [f"{', '.join(gone)} gone"] if gone else []
    said += [f"{', '.join(new)} new"] if new else []
    return "; ".join(said) or "the members meet again"


def newcomers(state: LedgerState, members: Set[str]) -> bool:
    """Whether a worker waits that there is room for, or a member is to leave: its members should meet again."""
    waiting = [worker.id for worker in state.registered if worker.id in state.ids and worker.id not in members]
    return bool(state.stop) or (bool(waiting) and len(members) < state.size)
