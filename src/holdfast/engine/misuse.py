"""Looks at what a script does with its steps, and warns of what is hardly meant: once each, by the first member.

Belongs to the thread of the user's loop. All members' scripts do the same, and what they do differently is found
elsewhere (auditing.py): so one of them is enough to tell. Costs nothing but a count in nearly every step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch

from holdfast.engine.optimizer_calls import STATE_ELSEWHERE
from holdfast.events import EventLog
from holdfast.membership.machine import Machine

STEPS = 20  # so many in a row
LOOK_EVERY = 5  # steps, at gradients that may be all zero
NEVER_CALLED = (
    "optimizer.step() was not called in the first {} steps, so the model does not change; call it after "
    "`for batch in step:` has ended"
)
CALLED_TWICE = (
    "optimizer.step() was called {} times in step {}, each time with the same gradients; call it once, after "
    "`for batch in step:` has ended"
)
NO_GRADIENT = (
    "no parameter got a gradient in {} steps: call loss.backward() inside `for batch in step:`, and do not clear the "
    "gradients there afterwards"
)
ALL_ZERO = (
    "all gradients are zero, in {} steps from step {} on: the loss does not depend on the parameters that are trained, "
    "or is multiplied by zero"
)


class Misuse:
    """The first member tells. `alone`: no agent reads the events."""

    def __init__(
        self, parameters: Sequence[torch.nn.Parameter], events: EventLog, machine: Machine, *, alone: bool
    ) -> None:
        self._parameters = sorted(parameters, key=lambda parameter: parameter.numel())
        self._events = events
        self._machine = machine
        self._alone = alone
        self._told: set[str] = set()
        self._steps = 0  # with gradients, that this process has applied
        self._called = False
        self._without = 0  # steps in a row without a gradient
        self._zero_since = -1
        self._zero_looks = 0

    def loaded(self, step: int, *, has_gradients: bool, is_zero: Callable[[], bool] | None = None) -> None:
        """The step's mean is in place, and the script's lines have not changed it yet. `is_zero` says whether all of it
        is, where to look at gradients would mean to wait for a device."""
        if not any(parameter.requires_grad for parameter in self._parameters):
            return  # a model that is only evaluated
        self._without = 0 if has_gradients else self._without + 1
        if self._without == STEPS:
            self._tell(NO_GRADIENT, STEPS)
        if has_gradients and step % LOOK_EVERY == 0:
            self._look(step, is_zero or self._are_zero)

    def applied(self, step: int, calls: Sequence[int], *, has_gradients: bool, stray: bool) -> None:
        self._called |= any(calls)
        self._steps += has_gradients
        if self._steps == STEPS and not self._called:
            self._tell(NEVER_CALLED, STEPS)
        if max(calls, default=0) > 1:
            self._tell(CALLED_TWICE, max(calls), step)
        if stray:
            self._tell(STATE_ELSEWHERE)

    def _are_zero(self) -> bool:
        """The smallest first: one number that is not zero is enough."""
        return not any(parameter.grad is not None and bool(parameter.grad.any()) for parameter in self._parameters)

    def _look(self, step: int, is_zero: Callable[[], bool]) -> None:
        if not is_zero():
            self._zero_since, self._zero_looks = -1, 0
            return
        if self._zero_since < 0:
            self._zero_since = step
        self._zero_looks += 1
        if self._zero_looks * LOOK_EVERY == STEPS:
            self._tell(ALL_ZERO, STEPS, self._zero_since)

    def _tell(self, text: str, *values: int) -> None:
        view = self._machine.view
        if text in self._told or view is None or view.members[:1] != (self._machine.me,):
            return
        self._told.add(text)
        said = text.format(*values) if values else text
        self._events.write("warning", text=said)
        if self._alone:
            warnings.warn(f"holdfast: {said}", stacklevel=2)
