"""Who watches whom among the workers of several hosts: each the next few in a ring. Pure.

Every worker sends to as many and hears from as many, however large the run: what heartbeats cost one worker does not
grow. The ring takes one worker of each host before it takes a second of any, so that neighbours are on different hosts
where hosts are of one size, and a host that is lost as a whole is missed by others.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.core.words import host_of

WATCHED = 2  # by each: one watcher may be lost together with whom it watches


def ring(members: Sequence[str]) -> tuple[str, ...]:
    """The members in ring order, a function of the view alone: all of them know it without a word."""
    hosts: dict[str, list[str]] = {}
    for member in members:
        hosts.setdefault(host_of(member), []).append(member)
    places = [(place, index, member) for index, host in enumerate(hosts.values()) for place, member in enumerate(host)]
    return tuple(member for _, _, member in sorted(places))


def watch_lists(members: Sequence[str], watched: int = WATCHED) -> dict[str, tuple[str, ...]]:
    """Whom each member watches: the next `watched` in the ring, fewer where there are fewer."""
    order = ring(members)
    count = min(watched, len(order) - 1)
    return {
        member: tuple(order[(place + ahead) % len(order)] for ahead in range(1, count + 1))
        for place, member in enumerate(order)
    }
