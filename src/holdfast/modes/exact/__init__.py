"""The exact mode: after step N the weights are bit for bit those of a run without failures, however many workers.

A step always has all its shards, and what shard v of step s holds follows from (seed, s, v) alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.data.shards import ShardPlan
from holdfast.membership.step_rules import StepRules
from holdfast.modes.exact.whole_steps import WholeSteps
from holdfast.modes.port import Mode


@dataclass(frozen=True)
class Exact(Mode):
    """The mode of a run that asks for no other."""

    def rules(self) -> StepRules:
        return StepRules()

    def data(self, plan: ShardPlan) -> WholeSteps:
        return WholeSteps(plan)
