"""What becomes of a step whose mean shows that the training goes wrong: stop, skip it, or go back and pass it.

Looks at every committed step before the script's lines see it. All members have the same bits of the mean and the same
metrics, and so they come to the same end at the same step. Belongs to the thread of the user's loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn, TypeGuard

import torch

from holdfast.core.config import RunConfig
from holdfast.core.errors import ConfigError, DivergedError
from holdfast.engine.worker import Worker
from holdfast.modes.capture import GradientCapture
from holdfast.modes.diverging import IN_A_ROW_MAX, LOSS, Losses, not_finite
from holdfast.reduce.reduction import KeptMean
from holdfast.state.extras import Stateful

SPIKE_STEPS = 3  # passed when a run goes back from a spike: those before it may have led to it


class Guard:
    """`extras` are join's: a gradient scaler among them looks at the gradients itself, and skips steps."""

    def __init__(
        self,
        config: RunConfig,
        extras: Mapping[str, Stateful],
        *,
        losses: Losses,
        capture: GradientCapture,
        worker: Worker,
    ) -> None:
        self._policy = config.non_finite
        self._spike = config.spike
        self._scaled = any(map(is_scaler, extras.values()))
        self._losses = losses
        self._capture = capture
        self._worker = worker
        self._events = worker.lines.events
        self._broken = ""  # what of the step at hand is not finite

    def inspect(self, kept: KeptMean) -> None:
        """While the mean is still there to be read: what others make of its memory later is not for us."""
        self._broken = ""
        if self._policy != "ignore" and not self._scaled and not not_finite(kept.metrics):
            self._broken = self._capture.first_non_finite(kept)

    def judge(self, kept: KeptMean) -> bool:
        """Whether the step is skipped. Ends the worker's part where it stops or goes back."""
        step = kept.step
        if step in self._worker.rewinding.passed:
            self._events.write("skipped", step=step, reason="the run has gone back from it")
            return True
        if self._policy == "ignore":
            return False
        if self._spike and LOSS not in kept.metrics:
            raise ConfigError(
                f"join(spike={self._spike:g}) looks at the metric {LOSS!r}, and no shard has recorded it",
                hint="call step.record(loss=loss) inside the loop over the shards, or leave spike out",
            )
        why = not_finite(kept.metrics)
        if not why and self._broken:
            why = f"{self._broken} is not finite"
        if why:
            return self._act(step, f"{why} at step {step}", (step,))
        if why := self._losses.spike(kept.metrics):
            return self._act(step, f"{why} at step {step}", tuple(range(max(0, step - SPIKE_STEPS + 1), step + 1)))
        return False

    def _act(self, step: int, why: str, passed: tuple[int, ...]) -> bool:
        if self._policy == "stop":
            self._stop(why)
        if self._policy == "rewind":
            self._worker.leaving.rewind(back_to=passed[0], passed=passed, reason=why)
        if self._losses.in_a_row >= IN_A_ROW_MAX:
            self._stop(f"{why}, and the {self._losses.in_a_row} steps before were skipped already")
        self._events.write("skipped", step=step, reason=why)
        self._capture.skip()
        return True

    def _stop(self, why: str) -> NoReturn:
        raise DivergedError(
            why,
            hint="lower the learning rate or clip gradients; join(non_finite='skip') leaves out such a step, "
            "'rewind' goes back, non_finite='ignore' goes on regardless",
        )


def is_scaler(extra: Any) -> TypeGuard[torch.amp.GradScaler]:
    return isinstance(extra, torch.amp.GradScaler) and extra.is_enabled()


def wake_scalers(model: torch.nn.Module, extras: Mapping[str, Stateful]) -> None:
    """A gradient scaler makes its scale when it first scales; a worker without shards in its first step never does."""
    device = next(model.parameters()).device
    for extra in extras.values():
        if is_scaler(extra):
            extra.scale(torch.zeros((), device=device))
