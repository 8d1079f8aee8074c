"""Who beats to whom between hosts: each agent to the next few in a ring of them. Pure.

Every agent sends to as many and hears from as many, however large the run: what heartbeats between hosts cost one of
them does not grow. The ring is the hosts that stand in the ledger, by name, so that all know it without a word. Of
the two that hear a host, the first beats to the second: so the second knows what both of them think of it.
"""

from __future__ import annotations

from collections.abc import Iterable

WATCHERS = 2  # of each: one may be lost together with whom it watches
BEAT_S = 0.25
LOOK_S = 0.1  # between two looks at who is silent


def successors(hosts: Iterable[str], me: str, count: int = WATCHERS) -> tuple[str, ...]:
    """Whom `me` beats to, the nearest first: fewer where there are fewer, none if it has no place itself."""
    return _following(sorted(set(hosts)), me, count)


def predecessors(hosts: Iterable[str], me: str, count: int = WATCHERS) -> tuple[str, ...]:
    """Whom `me` hears, the nearest first."""
    return _following(sorted(set(hosts), reverse=True), me, count)


def _following(order: list[str], me: str, count: int) -> tuple[str, ...]:
    if me not in order:
        return ()
    place = order.index(me)
    return tuple(order[(place + ahead) % len(order)] for ahead in range(1, min(count, len(order) - 1) + 1))
