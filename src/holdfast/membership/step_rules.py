"""What a step consists of, and who computes which of it: the rules that a mode gives to the machine. Pure.

All members ask the same rules with the same reports and messages, and must come to the same answers: nothing here may
depend on the member that asks. These are the strict rules, of steps that always have all their shards. A mode whose
steps may lack some gives its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from holdfast.core.words import View
from holdfast.membership.balance import divide, rebalanced
from holdfast.membership.messages import Ready
from holdfast.membership.view_rules import Plan, Report

Shares = dict[str, tuple[int, ...]]


class StepRules:
    """A step has all its shards: the members compute those that a lost member takes along."""

    whole: ClassVar[bool] = True  # False: members say which shards they bring, and the mean is over these
    even: bool = False  # shards do not follow the workers' paces

    def settle(self, plan: Plan, reports: Mapping[str, Report], shards: int) -> Plan:
        """The plan for the first step of a view, whose assignment covers all `shards` of it."""
        return plan

    def room(self, shards: int, view: View, reports: Mapping[str, Report]) -> int:
        """How many of a step's shards the members of this view take."""
        return shards

    def shares(self, room: int, members: Sequence[str], paces: Mapping[str, float]) -> Shares:
        """Who computes which shards in the later steps of a view. `paces`: seconds for a shard."""
        return divide(room, members, dict.fromkeys(paces, 1.0) if self.even else paces)

    def rebalanced(self, shares: Shares, room: int, paces: Mapping[str, float]) -> Shares | None:
        """Better shares after a step with these paces (0: not known); None: they stay."""
        return rebalanced(shares, room, paces) if not self.even else None

    def covers(self, brought: Sequence[tuple[str, tuple[int, ...]]], shards: int) -> bool:
        """Whether what the members bring makes a step: no shard twice, and as many as there must be."""
        everything = [shard for _, mine in brought for shard in mine]
        return len(set(everything)) == len(everything) and self.is_complete(len(everything), shards)

    def is_complete(self, brought: int, shards: int) -> bool:
        """Whether a step may be reduced to which its members have brought so many different shards."""
        return brought == shards

    def closes(self, ready: Mapping[str, Ready], view: View) -> bool:
        """Whether these members of a step need not wait for one that still computes."""
        return False


class EvenShares(StepRules):
    """Shards do not follow the workers' paces: who nobody vouches for is not asked how fast it is."""

    even = True
