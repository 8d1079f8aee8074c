"""The exact mode's hold on a model: what a shard leaves behind is collected, what a step decides is put back.

Owns the gradients and buffers of the user's model between the user's lines. Around each shard: buffers start from
the step's first values, gradients from nothing. After the reduction: `.grad` is the mean over all shards, a copy that
the user may clip or zero, and buffers are the mean of what the shards made of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from holdfast.core.errors import ConfigError
from holdfast.reduce.layout import Layout
from holdfast.reduce.reduction import Kept
from holdfast.reduce.sums import Sums


class Exact:
    """Collects and loads. Belongs to the thread that runs the user's loop."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.parameters = list(model.parameters())  # a shared parameter once
        self._buffers = dict(model.named_buffers())
        _check(self.parameters)
        self._names = list(self._buffers)
        self._base = [buffer.detach().clone() for buffer in self._buffers.values()]
        self._live = list(self._buffers.values())
        self._dirty = False
        self._layouts: dict[tuple[bool, ...], tuple[Layout, list[int]]] = {}
        self._trained: list[torch.nn.Parameter] = []
        self._layout: Layout | None = None
        self._loaded: tuple[int, Layout, list[torch.Tensor]] | None = None

    def whole_layout(self) -> Layout:
        """With every parameter trained: the most room a slot can need."""
        return Layout([*self.parameters, *self._base])

    def base_buffers(self) -> Mapping[str, torch.Tensor]:
        """The buffers as they were when the step began."""
        return dict(zip(self._names, self._base, strict=True))

    def rebase(self) -> None:
        """Whatever the buffers are now is where the next step starts."""
        if self._live:
            with torch.no_grad():
                torch._foreach_copy_(self._base, self._live)
        self._dirty = False

    def layout(self) -> Layout:
        """For the parameters that are trained now. The same for all workers, whose scripts do the same."""
        flags = tuple([parameter.requires_grad for parameter in self.parameters])
        found = self._layouts.get(flags)
        if found is None:
            trained = [index for index, flag in enumerate(flags) if flag]
            tensors = [self.parameters[index] for index in trained]
            found = self._layouts[flags] = (Layout([*tensors, *self._base]), trained)
        self._layout, trained = found
        self._trained = [self.parameters[index] for index in trained]
        return self._layout

    def before_shard(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        if self._dirty:
            with torch.no_grad():
                torch._foreach_copy_(self._live, self._base)
            self._dirty = False

    def after_shard(self, shard: int, sums: Sums) -> None:
        with torch.no_grad():
            tensors: list[torch.Tensor | None] = [parameter.grad for parameter in self._trained]
            present = [index for index, tensor in enumerate(tensors) if tensor is not None]
            first = len(tensors)
            for offset, (live, base) in enumerate(zip(self._live, self._base, strict=True)):
                if not torch.equal(live, base):
                    present.append(first + offset)
                    self._dirty = True
            tensors += self._live
            sums.add(shard, tensors, present)

    def load(self, kept: Kept) -> None:
        """Put the mean of a step where the user's lines expect it."""
        views = self._views(kept)
        with torch.no_grad():
            grads: list[torch.Tensor] = []
            means: list[torch.Tensor] = []
            for index, parameter in enumerate(self._trained):
                if index not in kept.present:
                    parameter.grad = None
                    continue
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                elif parameter.grad.requires_grad:
                    parameter.grad = parameter.grad.detach()
                grads.append(parameter.grad)
                means.append(views[index])
            if grads:
                torch._foreach_copy_(grads, means)
            first = len(self._trained)
            for offset, (live, base) in enumerate(zip(self._live, self._base, strict=True)):
                if first + offset in kept.present:
                    live.copy_(views[first + offset])
                elif self._dirty:
                    live.copy_(base)
        self._dirty = False

    def _views(self, kept: Kept) -> list[torch.Tensor]:
        key = kept.memory.data_ptr()
        if self._loaded is None or self._loaded[0] != key or self._loaded[1] is not kept.layout:
            self._loaded = (key, kept.layout, kept.layout.views(kept.memory))
        return self._loaded[2]


def _check(parameters: list[torch.nn.Parameter]) -> None:
    if not parameters:
        raise ConfigError("the model has no parameters", hint="pass the module that the optimizer trains")
    for parameter in parameters:
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            raise ConfigError(
                "the model has lazy parameters that have no shape yet",
                hint="run one forward pass before holdfast.join",
            )
