"""The elastic mode: a step takes what the workers bring that are there, and the batch follows them.

With a quorum, a step waits for so many workers with shards and not for those that are late. `batch_size` is that of a
run at full size. Every sample of an epoch is used once, and all workers have the same bits; which bits depends on who
was there in which step.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.config import RunConfig
from holdfast.core.errors import ConfigError
from holdfast.data.shards import ShardPlan
from holdfast.modes.elastic.quorum import QuorumAttendance
from holdfast.modes.elastic.rules import ElasticRules, EvenElasticRules, QuorumRules
from holdfast.modes.elastic.units import UnitsInLine
from holdfast.modes.port import Attendance, TrainingParts, refuse_handed
from holdfast.modes.robust import WithRule


@dataclass(frozen=True)
class Elastic(WithRule):
    """`quorum`: a step waits for so many workers with shards; None: for all that are there. `aggregate`: a robust rule
    in place of the mean."""

    quorum: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.quorum is not None and (type(self.quorum) is not int or self.quorum < 1):
            raise ConfigError(f"quorum is {self.quorum!r}", hint="how many workers a step waits for, at least 1")

    def check(self, config: RunConfig, plan: ShardPlan) -> None:
        self.check_rule(config)
        refuse_handed(plan)
        if config.non_finite == "rewind":
            raise ConfigError(
                "non_finite='rewind' passes steps by their number, and in elastic mode that does not say which data",
                hint="non_finite='skip' leaves out the update of such a step",
            )
        if plan.cut is not None:
            raise ConfigError(
                "in elastic mode every epoch has equal steps, and a trainer's updates of a stream are not",
                hint="leave out mode=holdfast.Elastic()",
            )
        if plan.sampling is not None and (plan.sampling.batches or plan.sampling.is_function):
            what = "a batch_sampler" if plan.sampling.batches else "a function of the epoch as sampler"
            raise ConfigError(
                f"in elastic mode every epoch has the same number of equal shards, and {what} does not say so",
                hint="give a sampler with a length, and batch_size=...; or leave out mode=holdfast.Elastic()",
            )

    def check_size(self, workers: int, shards: int) -> None:
        super().check_size(workers, shards)
        if self.quorum is not None and self.quorum > workers:
            raise ConfigError(
                f"quorum={self.quorum} waits for more workers than the {workers} of the run",
                hint="a quorum is smaller than --workers by as many as may be late",
            )

    def rules(self) -> ElasticRules:
        if self.quorum is not None:
            return QuorumRules(self.quorum)
        return ElasticRules() if self.aggregate is None else EvenElasticRules()

    def data(self, plan: ShardPlan) -> UnitsInLine:
        return UnitsInLine(plan)

    def attendance(self, parts: TrainingParts) -> Attendance:
        return QuorumAttendance() if self.quorum is not None else Attendance()
