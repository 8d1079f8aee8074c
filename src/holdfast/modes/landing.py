"""How a step's mean comes from the memory in which it was added up to where the user's lines expect it: a port.

In this process each gradient is a copy that the user may change. On a device all of the mean goes up in one copy, which
nobody waits for, and gradients are views of that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from holdfast.devices.copies import send
from holdfast.reduce.reduction import KeptMean
from holdfast.state.local import local


class Landing(Protocol):
    def views(self, kept: KeptMean) -> list[torch.Tensor]:
        """The mean as one tensor for each of the layout's, where the model is."""

    def give(self, parameters: Sequence[torch.nn.Parameter], means: Sequence[torch.Tensor]) -> None:
        """Each parameter its mean, as .grad: the user's own from then on."""


class Near:
    """The model is in this process's memory."""

    def __init__(self) -> None:
        self._last: tuple[int, object, list[torch.Tensor]] | None = None

    def views(self, kept: KeptMean) -> list[torch.Tensor]:
        key = kept.memory.data_ptr()
        if self._last is None or self._last[0] != key or self._last[1] is not kept.layout:
            self._last = (key, kept.layout, kept.layout.views(kept.memory))
        return self._last[2]

    def give(self, parameters: Sequence[torch.nn.Parameter], means: Sequence[torch.Tensor]) -> None:
        grads: list[torch.Tensor] = []
        for parameter in parameters:
            grad = parameter.grad
            if grad is None or grad.stride() != parameter.stride():
                # A hook may have given it other strides here, and a worker without shards has none of them.
                grad = parameter.grad = torch.empty_like(parameter)
            elif grad.requires_grad:
                grad = parameter.grad = grad.detach()
            grads.append(grad)
        if grads:
            torch._foreach_copy_([local(grad) for grad in grads], list(means))


class OnDevice:
    def __init__(self, device: torch.device) -> None:
        self._device = device

    def views(self, kept: KeptMean) -> list[torch.Tensor]:
        return kept.layout.views(send(kept.memory, self._device))

    def give(self, parameters: Sequence[torch.nn.Parameter], means: Sequence[torch.Tensor]) -> None:
        for parameter, mean in zip(parameters, means, strict=True):
            same = mean.stride() == parameter.stride()
            parameter.grad = mean if same else torch.empty_like(parameter).copy_(mean)
