"""The exact mode: after step N the weights are bit for bit those of a run without failures, however many workers.

A step always has all its shards, and what shard v of step s holds follows from (seed, s, v) alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from holdfast.core.config import RunConfig
from holdfast.core.errors import ConfigError
from holdfast.data.shards import ShardPlan
from holdfast.membership.step_rules import EvenShares, StepRules
from holdfast.modes.exact.handed_steps import HandedSteps
from holdfast.modes.exact.whole_steps import WholeSteps
from holdfast.modes.port import DataPlan
from holdfast.modes.robust import WithRule


@dataclass(frozen=True)
class Exact(WithRule):
    """The mode of a run that asks for no other. `aggregate`: a robust rule in place of the mean."""

    on_devices: ClassVar[bool] = True
    in_groups: ClassVar[bool] = True

    def check(self, config: RunConfig, plan: ShardPlan) -> None:
        self.check_rule(config)
        if self.aggregate is not None and plan.handed is not None:
            raise ConfigError(
                "aggregate= expects workers that may be hostile, and one worker would read the dataset, an iterable, "
                "for all",
                hint="use a dataset with __len__ and __getitem__, or holdfast.data.Stream, of which each reads its own",
            )

    def rules(self) -> StepRules:
        return StepRules() if self.aggregate is None else EvenShares()

    def data(self, plan: ShardPlan) -> DataPlan:
        return WholeSteps(plan) if plan.handed is None else HandedSteps(plan, plan.handed)
