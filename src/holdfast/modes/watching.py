"""What a script does to parameters and gradients at moments when only one worker does it: noticed, and named.

    a forward changes a parameter in place    on the worker that computes the shard (nn.Embedding with max_norm)
    a backward after the loop over shards     with the samples that this worker happened to have

Looking costs a call for each parameter, so it is done at all of them in the first steps, where such lines show, and
after that now and then or at one of them. Belongs to the thread that runs the user's loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from holdfast.core.errors import ConfigError
from holdfast.state.digest import digest_tensors

_SHARDS_ALL: Final = 24  # the first shards of a worker, all of whose parameters are looked at
_SHARDS_BETWEEN: Final = 256  # after that every so many
_STEPS_ALL: Final = 3


class ParameterWatch:
    """Whether a forward or backward pass of a shard has changed a parameter, by torch's count of changes."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], name_of: Callable[[torch.nn.Parameter], str]) -> None:
        self._parameters = parameters
        self._name_of = name_of
        self._shards = 0
        self._versions: list[int] | None = None

    def before_shard(self) -> None:
        self._shards += 1
        due = self._shards <= _SHARDS_ALL or self._shards % _SHARDS_BETWEEN == 0
        self._versions = [parameter._version for parameter in self._parameters] if due else None

    def after_shard(self) -> None:
        versions, self._versions = self._versions, None
        if versions is None:
            return
        for parameter, version in zip(self._parameters, versions, strict=True):
            if parameter._version != version:
                raise ConfigError(
                    f"the parameter {self._name_of(parameter)} was changed while a shard was computed, "
                    "which only this worker does",
                    hint="change parameters after the loop over the shards, on every worker; for an embedding leave "
                    "max_norm out and call weight.renorm_(2, 0, max_norm) under torch.no_grad() after optimizer.step()",
                )


class BackwardWatch:
    """Whether gradients were added to after the mean over all shards was put into them.

    What is the same on every worker, such as a penalty on weights, may be. So it is not refused here: members compare.
    """

    def __init__(self) -> None:
        self._steps = 0
        self._armed = False
        self._first: Any = None  # the hook that stays
        self._others: list[Any] = []
        self._found = False
        self._trained: Sequence[torch.nn.Parameter] = ()

    def arm(self, trained: Sequence[torch.nn.Parameter]) -> None:
        """The mean is in place."""
        self._armed, self._found, self._trained = True, False, trained
        if self._steps < _STEPS_ALL and trained:
            self._steps += 1
            self._others = [self._hook(parameter) for parameter in trained]
            if self._first is None:
                self._first = self._hook(trained[0])

    def disarm(self) -> None:
        """A shard begins, whose backward is where it belongs."""
        self._armed = False
        for hook in self._others:
            hook.remove()
        self._others = []

    def late_gradients(self) -> int:
        """A digest of the gradients if a backward has added to them since the mean was put there; else 0."""
        if not self._found:
            return 0
        named = ((str(number), parameter.grad) for number, parameter in enumerate(self._trained))
        return int(digest_tensors((name, grad) for name, grad in named if grad is not None)[:15], 16) | 1

    def _hook(self, parameter: Any) -> Any:
        return parameter.register_post_accumulate_grad_hook(self._accumulated)

    def _accumulated(self, parameter: torch.Tensor) -> None:
        self._found = self._found or self._armed


def check_closure(args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """A closure computes its gradients from what this worker has at hand, once or many times in a step."""
    if (args and args[0] is not None) or kwargs.get("closure") is not None:
        raise ConfigError(
            "optimizer.step() was given a closure, whose gradients would be only this worker's",
            hint="compute loss and gradients inside `for batch in step:`, then call optimizer.step() without arguments",
        )
