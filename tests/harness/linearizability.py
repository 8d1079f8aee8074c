"""Whether a history of concurrent operations could have happened one at a time: the search of Wing and Gong.

A history is a list of operations, each with the times of its call and of its return. It is linearizable if there is an
order of all of them in which each one's outcome is what the model says, and in which an operation that returned before
another was called comes first. An operation that never returned may have happened at any time after its call, or not.

The search takes one of the operations that could be next, and goes back where that leads nowhere. As Lowe's and
Porcupine's do, it remembers which sets of operations have led to which state: what follows from there is known.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

READS_AHEAD = 64  # of those to come, so many are asked whether they still can


@dataclass(frozen=True, slots=True)
class Operation:
    """`returned_at` is infinite where nobody knows what came of it; then its outcome is not looked at."""

    client: str
    call: tuple[Any, ...]
    called_at: float
    returned_at: float = math.inf
    outcome: Any = None

    @property
    def is_open(self) -> bool:
        return self.returned_at == math.inf


@dataclass(frozen=True, slots=True)
class Model:
    """What one thing does when it is asked one thing at a time. It begins with `initial`.

    `step`: from a state, a call and its outcome: whether they fit, and the next state.
    `is_past`: a read with this outcome, which is still to come, cannot come any more once this state is reached.
    """

    initial: Any
    step: Callable[[Any, tuple[Any, ...], Any], tuple[bool, Any]]
    is_past: Callable[[Any, Any], bool] = lambda state, outcome: False


def _step_register(state: Any, call: tuple[Any, ...], outcome: Any) -> tuple[bool, Any]:
    if call[0] == "write":
        return True, call[1]
    return outcome == state, state


def _step_counter(state: int, call: tuple[Any, ...], outcome: Any) -> tuple[bool, int]:
    if call[0] == "add":
        return True, state + call[1]
    return outcome == state, state


REGISTER = Model(None, _step_register)  # ("write", value) and ("read",)
COUNTER = Model(0, _step_counter)  # ("add", number) and ("read",)
BITS = Model(0, _step_counter, lambda state, outcome: bool(state & ~outcome))  # a counter; each add has its own bit


def is_linearizable(history: Sequence[Operation], model: Model) -> bool:
    return not explain(history, model)


def explain(history: Sequence[Operation], model: Model) -> str:
    """Empty if the history is linearizable; else how far the best order got, and what did not fit there."""
    operations = sorted(
        (one for one in history if not (one.is_open and one.call[0] == "read")), key=lambda one: one.called_at
    )
    needed = sum(1 << position for position, one in enumerate(operations) if not one.is_open)
    reads = [position for position, one in enumerate(operations) if one.call[0] == "read"]
    seen: set[tuple[int, Hashable]] = set()
    furthest, stuck = -1, ""
    stack: list[tuple[int, Any]] = [(0, model.initial)]
    while stack:
        done, state = stack.pop()
        if done & needed == needed:
            return ""
        following: list[tuple[int, Any]] = []
        rejected: list[Operation] = []
        first = (~done & (done + 1)).bit_length() - 1  # everything before it is done
        looked_at = [at for at in reads[bisect_left(reads, first) :][:READS_AHEAD] if not done >> at & 1]
        for position, one in _next(operations, done >> first, first):
            fits, then = model.step(state, one.call, one.outcome)
            step = (done | 1 << position, then)
            if not fits:
                rejected.append(one)
            elif step not in seen:
                seen.add(step)
                if not any(at != position and model.is_past(then, operations[at].outcome) for at in looked_at):
                    following.append(step)
        stack += reversed(following)
        if not following and done.bit_count() > furthest and rejected:
            furthest = done.bit_count()
            stuck = f"after {furthest} operations the state is {state!r}, which does not fit {rejected}"
    return stuck or "no order fits"


def _next(operations: Sequence[Operation], done: int, first: int) -> list[tuple[int, Operation]]:
    """The operations that no other one which is not done precedes. `done` is of those from `first` on."""
    open_until = math.inf
    found: list[tuple[int, Operation]] = []
    for position in range(first, len(operations)):
        if done >> (position - first) & 1:
            continue
        one = operations[position]
        if one.called_at > open_until:
            break
        open_until = min(open_until, one.returned_at)
        found.append((position, one))
    # The earliest to return first, so that the depth of the search is seldom more than the history's length.
    return sorted((step for step in found if step[1].called_at <= open_until), key=lambda step: step[1].returned_at)
