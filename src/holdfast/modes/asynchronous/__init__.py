"""The asynchronous mode: workers push gradients to parameter servers and pull parameters, and wait for no view.

A step is one update, made by one worker: it has all shards of that step, and the others' loops pass it without any.
The optimizers run on the servers, which lose no update that they acknowledged and apply none twice. What the weights
are depends on the order of updates: runs are not repeatable bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.config import RunConfig
from holdfast.core.errors import ConfigError
from holdfast.data.shards import ShardPlan
from holdfast.modes.asynchronous.attendance import ServedAttendance
from holdfast.modes.asynchronous.given_steps import GivenSteps
from holdfast.modes.asynchronous.rules import OwnSteps
from holdfast.modes.port import Mode, TrainingParts, refuse_handed
from holdfast.servers.codecs import codec_of


@dataclass(frozen=True)
class Async(Mode):
    """`staleness`: how many rounds of data a step may be ahead of the first step that is not finished.

    With W workers, W steps are a round: step u begins when all steps before (u // W - staleness) * W are finished, and
    its parameters have their updates. 0 is lock step, one round after the other. With k, fast workers make more steps
    than slow ones, and wait only for somebody who is still in a step k rounds back. None: nobody waits for anybody.

    `adaptive`: an update that is stale by s others counts one s-th. `compress`: how gradients travel, for slow links:
    "fp16", "bf16", "int8", or "top-k:0.01" for the largest hundredth of them. What that leaves out of an update goes
    into the worker's later ones.
    """

    staleness: int | None = 4
    adaptive: bool = False
    compress: str | None = None

    uses_servers = True

    def __post_init__(self) -> None:
        if self.staleness is not None and (type(self.staleness) is not int or self.staleness < 0):
            raise ConfigError(
                f"staleness is {self.staleness!r}",
                hint="how many rounds of steps workers may be apart: 0 is lock step, None is no bound",
            )
        if type(self.adaptive) is not bool:
            raise ConfigError(f"adaptive is {self.adaptive!r}", hint="adaptive=True or adaptive=False")
        if self.compress is not None:
            codec_of(self.compress)

    def check(self, config: RunConfig, plan: ShardPlan) -> None:
        refuse_handed(plan)
        if config.non_finite == "rewind" or config.spike:
            what = "non_finite='rewind' goes" if config.non_finite == "rewind" else "spike= judges by steps and goes"
            raise ConfigError(
                f"{what} back to an earlier step, and in the asynchronous mode the others have gone on from it",
                hint="non_finite='skip' leaves out the update of such a step",
            )

    def rules(self) -> OwnSteps:
        return OwnSteps()

    def data(self, plan: ShardPlan) -> GivenSteps:
        return GivenSteps(plan)

    def attendance(self, parts: TrainingParts) -> ServedAttendance:
        assert isinstance(parts.data, GivenSteps)
        codec = codec_of(self.compress) if self.compress is not None else None
        return ServedAttendance(parts, parts.data, self.staleness, adaptive=self.adaptive, codec=codec)
