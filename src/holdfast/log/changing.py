"""A change of the configuration that the primary carries out: one at a time, each with a deadline and a reason.

A new replica is sent the snapshot and the log while it counts for nothing, and is proposed when it is level. To hand
the slice over, the primary takes no more updates and serves no reads until the other one has its whole log; and once
that is proposed, until the ledger shows the next epoch: a proposal of which nothing is known may be carried out late.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.log.configuration import Configuration, LogEnd
from holdfast.log.messages import AddReplica, HandOver, RemoveReplica, Wish
from holdfast.log.rules import Rules


@dataclass(frozen=True, slots=True)
class Renew:
    """The next epoch with the same replicas: this one has sealed the present one, and takes nothing more of it."""

    server: str


@dataclass(slots=True)
class Change:
    wish: Wish | Renew
    deadline: float
    proposed_at: float | None = None

    @property
    def freezes(self) -> bool:
        return isinstance(self.wish, HandOver)


def begin(wish: Wish | Renew, now: float, rules: Rules) -> Change:
    frozen = isinstance(wish, HandOver)
    return Change(wish, now + (4 * rules.lease_s if frozen else rules.change_timeout_s))


def objection(wish: Wish | Renew, me: str, configuration: Configuration) -> str:
    """Why this cannot be wished for; empty: it can."""
    present = wish.server in configuration.replicas
    if isinstance(wish, AddReplica):
        return f"{wish.server} is a replica already" if present else ""
    if not present:
        return f"{wish.server} is no replica"
    if wish.server == me:
        return "it is the primary itself" + (", which is handed over first" if isinstance(wish, RemoveReplica) else "")
    return ""


def proposal(
    change: Change, configuration: Configuration, matched: int, end: LogEnd, committed: int
) -> Configuration | None:
    """What to propose now, if it is time. `matched`: how much of the log the server in question has."""
    wish, replicas = change.wish, configuration.replicas
    if isinstance(wish, AddReplica):
        level = matched >= committed
        return configuration.next(f"{wish.server} is level", replicas=(*replicas, wish.server)) if level else None
    if isinstance(wish, RemoveReplica):
        rest = tuple(one for one in replicas if one != wish.server)
        return configuration.next(f"{wish.server} is removed", replicas=rest)
    if isinstance(wish, Renew):
        return configuration.next(f"{wish.server} has sealed epoch {configuration.epoch}")
    if matched < end.index:
        return None
    return configuration.next(f"handed over by {configuration.primary}", primary=wish.server)
