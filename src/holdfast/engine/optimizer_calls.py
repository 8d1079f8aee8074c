"""Every call of an optimizer's step(): refused in the loop over shards, counted after it, and compared by the members.

Owned by the thread of the user's loop. How often each of the run's optimizers was called in the last step goes along in
this worker's next Ready: where members differ in it, the script calls it on some of them only.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from holdfast.core.errors import ConfigError

STATE_ELSEWHERE = (
    "an optimizer that join was not given trains parameters of the model, and its state does not travel to workers "
    'that join; give join all of them by name: holdfast.join(model, {"first": optimizer, "second": other}, ...)'
)


class OptimizerCalls:
    """`parameters`: the model's."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self._parameters = {id(parameter) for parameter in parameters}
        self._run: tuple[torch.optim.Optimizer, ...] = ()
        self._trains: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = weakref.WeakKeyDictionary()
        self._counts: list[int] = []
        self._last: tuple[int, tuple[int, ...], int] = (-1, (), 0)
        self._late = 0
        self._in_shard: Callable[[], bool] = lambda: False
        self._applies: Callable[[], bool] = lambda: False
        self._late_gradients: Callable[[], int] = lambda: 0
        self._handle: Any = None
        self.stray = False  # a further optimizer whose state does not travel was called

    def watch(
        self,
        optimizers: Iterable[torch.optim.Optimizer],
        *,
        in_shard: Callable[[], bool],
        applies: Callable[[], bool],
        late_gradients: Callable[[], int],
    ) -> None:
        """`in_shard`: the loop over shards has the word; `applies`: it has ended, and the step is being applied.

        `late_gradients`: a digest of the gradients if a backward has added to them since then; else 0.
        """
        self._run = tuple(optimizers)
        self._counts = [0] * len(self._run)
        self._in_shard, self._applies, self._late_gradients = in_shard, applies, late_gradients
        called = weakref.WeakMethod(self._called)

        def hook(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            if (method := called()) is not None:
                method(optimizer)

        self._handle = register_optimizer_step_pre_hook(hook)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.remove()

    def applied(self, step: int) -> tuple[int, ...]:
        """The step is applied: how often each optimizer was called in it."""
        self._last = (step, tuple(self._counts), self._late)
        self._counts, self._late = [0] * len(self._run), 0
        return self._last[1]

    def before(self, step: int) -> tuple[int, ...]:
        """How often each was called in the step before this one; empty: this worker was not in it."""
        return self._last[1] if self._last[0] == step - 1 else ()

    def late_before(self, step: int) -> int:
        """The digest of what a late backward left in the step before this one; 0: there was none."""
        return self._last[2] if self._last[0] == step - 1 else 0

    def _called(self, optimizer: torch.optim.Optimizer) -> None:
        number = next((number for number, one in enumerate(self._run) if one is optimizer), None)
        if number is None and not self._trains_the_model(optimizer):
            return
        if self._in_shard():
            which = (
                "optimizer.step()" if number is not None else f"step() of another optimizer, of {_words(optimizer)},"
            )
            raise ConfigError(
                f"{which} was called inside the loop over a step's shards",
                hint="move it one level out: after `for x, y in step:` has ended, .grad is the mean over all shards",
            )
        if number is None:
            self.stray |= bool(optimizer.state)
        elif self._applies():
            self._counts[number] += 1
            self._late = self._late or self._late_gradients()

    def _trains_the_model(self, optimizer: torch.optim.Optimizer) -> bool:
        if optimizer not in self._trains:
            trained = (id(parameter) for group in optimizer.param_groups for parameter in group["params"])
            self._trains[optimizer] = not self._parameters.isdisjoint(trained)
        return self._trains[optimizer]


def _words(optimizer: torch.optim.Optimizer) -> str:
    return f"a {type(optimizer).__name__} on parameters of the model"
