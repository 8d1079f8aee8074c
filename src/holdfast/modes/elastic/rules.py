"""The rules of the elastic mode: how many shards a step has, and what becomes of those that are missing. Pure.

A step takes what its members bring, and the mean is over that. With fewer workers than the run is meant to have, each
does what it would do in a full run, so that a step has fewer shards rather than taking longer. Who is lost in a step
takes its shards along: the others do not compute them again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from holdfast.core.words import View
from holdfast.membership.messages import Ready
from holdfast.membership.step_rules import EvenShares, StepRules
from holdfast.membership.view_rules import Plan, Report, assign


def room(shards: int, workers: int, size: int) -> int:
    """How many of a full step's shards so many workers take, in a run of `size` of them."""
    return min(shards, workers * -(-shards // max(1, size)))


def size_of(reports: Mapping[str, Report]) -> int:
    """How many workers the run is meant to have, as its members have heard. They must not differ in what they make of
    it: each would cut the step in its own way."""
    return max((report.size for report in reports.values()), default=1)


class ElasticRules(StepRules):
    whole = False

    def settle(self, plan: Plan, reports: Mapping[str, Report], shards: int) -> Plan:
        """The shards that are there; where there are none yet, those of a step that begins."""
        able = list(plan.assignment)
        held = {member: reports[member].held if reports[member].next == plan.step else () for member in able}
        if any(held.values()):
            return replace(plan, assignment={member: tuple(sorted(shards)) for member, shards in held.items()})
        return replace(plan, assignment=assign(room(shards, len(able), size_of(reports)), able))

    def room(self, shards: int, view: View, reports: Mapping[str, Report]) -> int:
        return room(shards, len(view.members), size_of(reports))

    def is_complete(self, brought: int, shards: int) -> bool:
        return True


class EvenElasticRules(EvenShares, ElasticRules):
    """Shares do not follow the paces."""


class QuorumRules(EvenElasticRules):
    """So many others with shards need not wait for a member that is late."""

    def __init__(self, quorum: int) -> None:
        self.quorum = quorum

    def closes(self, ready: Mapping[str, Ready], view: View) -> bool:
        """So many others have brought shards, or all of them what they had."""
        brought = sum(bool(message.shards) for message in ready.values())
        return brought >= self.quorum or (brought > 0 and len(ready) >= max(self.quorum, len(view.members) - 1))
