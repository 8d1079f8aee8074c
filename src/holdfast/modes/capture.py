"""The exact mode's hold on a model: what a shard leaves behind is collected, what a step decides is put back.

Owns the gradients and buffers of the user's model between the user's lines. Around each shard: buffers start from
the step's first values, gradients from nothing. After the reduction: `.grad` is the mean over all shards, a copy that
the user may clip or zero, and buffers are the mean of what the shards made of them.
"""

from __future__ import annotations

import cmath
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import torch

from holdfast.core.errors import ConfigError
from holdfast.data.alignment import Moved, align_tensor
from holdfast.devices.found import device_of
from holdfast.modes.buffers import Buffers
from holdfast.modes.landing import Landing, Near, OnDevice
from holdfast.modes.table_gradients import TableGradients
from holdfast.modes.watching import BackwardWatch, ParameterWatch
from holdfast.reduce.layout import Layout
from holdfast.reduce.reduction import KeptMean
from holdfast.reduce.slots import Deferred
from holdfast.state.local import is_sharded, local
from holdfast.state.naming import named_parameters


class Collector(Protocol):
    """Where a shard's tensors go: into the sums, or to whoever compares them."""

    def add(self, shard: int, tensors: Sequence[torch.Tensor | None], present: Iterable[int]) -> None: ...


class Nowhere:
    """For a shard that came too late: nobody waited for it."""

    def add(self, shard: int, tensors: Sequence[torch.Tensor | None], present: Iterable[int]) -> None:
        pass


NOWHERE = Nowhere()
_NO_GRADIENTS = torch.no_grad()  # to make one takes as long as to enter it; never entered twice at once


class _Summed(NamedTuple):
    """A section of a mean, whose sums say whether it is finite."""

    gradients: torch.Tensor
    entries: Sequence[int]  # those, by their numbers in the layout
    buffers: torch.Tensor


class GradientCapture:
    """Collects and loads. Belongs to the thread that runs the user's loop."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.parameters = list(model.parameters())  # a shared parameter once
        self.sharded = any(map(is_sharded, self.parameters))  # over the ranks of a group
        self._names = {id(parameter): name for name, parameter in named_parameters(model).items()}
        _check(self.parameters)
        self.device = device_of([*self.parameters, *model.buffers()])  # None: this process's memory
        self.agree: Callable[[str], str] = lambda found: found  # with other ranks, on what this one has found
        self.open_leaf: Callable[[float], None] | None = None  # of several ranks: weighed before ranks' are added up
        self.has_say: Callable[[torch.Tensor, torch.Tensor], bool] | None = (
            None  # of several ranks: there is a gradient
        )
        self._landing: Landing = Near() if self.device is None else OnDevice(self.device)
        moved: Moved = {}
        for parameter in self.parameters if not self.sharded else []:
            align_tensor(parameter, moved)  # made from an array, it lies elsewhere in every process
        self.buffers = Buffers(model)
        self.tables = TableGradients(model)
        self._parameter_watch = ParameterWatch(self.parameters, self._name_of)
        self.backward_watch = BackwardWatch()
        self._layouts: dict[tuple[bool, ...], tuple[Layout, list[int]]] = {}
        self._trained: list[torch.nn.Parameter] = []
        self._frozen: list[torch.nn.Parameter] = []
        self._layout: Layout | None = None
        self._summed: tuple[int, Layout, list[_Summed]] | None = None  # where a mean was, and its sections
        self._weight = 1.0
        self.has_gradients = False  # of the step that was loaded last

    def whole_layout(self) -> Layout:
        """With every parameter trained: the most room a slot can need."""
        return Layout([*map(local, self.parameters), *self.buffers.sums_like], len(self.parameters))

    def layout(self) -> Layout:
        """For the parameters that are trained now. The same for all workers, whose scripts do the same."""
        flags = tuple([parameter.requires_grad for parameter in self.parameters])
        found = self._layouts.get(flags)
        if found is None:
            trained = [index for index, flag in enumerate(flags) if flag]
            tensors = [local(self.parameters[index]) for index in trained]
            found = self._layouts[flags] = (Layout([*tensors, *self.buffers.sums_like], len(tensors)), trained)
        self._layout, trained = found
        self._trained = [self.parameters[index] for index in trained]
        self._frozen = [parameter for parameter, flag in zip(self.parameters, flags, strict=True) if not flag]
        return self._layout

    def before_shard(self, weight: float = 1.0) -> None:
        """`weight`: what its gradients will count for, where shards have unequal numbers of samples."""
        # Around both loops, autocast keeps its casts of the weights: of which step and shard, depends on the worker.
        torch.clear_autocast_cache()
        for parameter in self.parameters:
            parameter.grad = None
        self.buffers.start_again()
        self.tables.before_shard()
        self._weight = weight if self.open_leaf is None else 1.0
        if self.open_leaf is not None:
            self.open_leaf(weight)
        self.backward_watch.disarm()
        self._parameter_watch.before_shard()

    def after_shard(self, shard: int, sums: Collector) -> None:
        self._parameter_watch.after_shard()
        with _NO_GRADIENTS:
            grads = (parameter.grad for parameter in self._trained)
            tensors: list[torch.Tensor | None] = [None if grad is None else local(grad) for grad in grads]
            present = [index for index, tensor in enumerate(tensors) if tensor is not None]
            if len(present) < len(tensors) or self._frozen:
                self._check_gradients()
            if self.has_say is not None:
                said = zip(self._trained, tensors, strict=True)
                has_say = [one is not None and self.has_say(parameter, one) for parameter, one in said]
                present = [index for index in present if has_say[index]]
            if self._weight != 1.0:
                tensors = [None if tensor is None else tensor * self._weight for tensor in tensors]
            first = len(tensors)
            buffers, changed = self.buffers.collect()
            if self.sharded and len(changed):
                raise ConfigError(
                    "a buffer of a model that is sharded over a group changes while a shard is computed",
                    hint="use normalisation without running statistics, such as LayerNorm or GroupNorm",
                )
            if isinstance(changed, torch.Tensor):
                sums.add(shard, [*tensors, *buffers], Deferred(present, first, changed))
            else:
                sums.add(shard, [*tensors, *buffers], [*present, *(first + number for number in changed)])

    def _check_gradients(self) -> None:
        if any(parameter.grad is not None for parameter in self._frozen):
            raise ConfigError(
                "a parameter that was frozen when the step began has a gradient",
                hint="set requires_grad before `for batch in step:`, so that all shards train the same parameters",
            )
        if any(parameter.grad is not None and parameter.grad.is_sparse for parameter in self._trained):
            raise ConfigError(
                "a gradient is sparse, and sparse gradients cannot be summed in a fixed order",
                hint="build the embedding with sparse=False, or use holdfast.EmbeddingTable",
            )

    def load(self, kept: KeptMean) -> None:
        """Put the mean of a step where the user's lines expect it."""
        with _NO_GRADIENTS:
            views = self._landing.views(kept)
            for parameter in self._frozen:
                parameter.grad = None  # of a step before it was frozen, on a worker that has no shards in this one
            given: list[torch.nn.Parameter] = []
            means: list[torch.Tensor] = []
            for index, parameter in enumerate(self._trained):
                if index in kept.present:
                    given.append(parameter)
                    means.append(views[index])
                else:
                    parameter.grad = None
            self._landing.give(given, means)
            self.has_gradients = bool(given)
            self.buffers.load(views[len(self._trained) :], self._buffers_in(kept))
        torch.clear_autocast_cache()
        self.backward_watch.arm(self._trained)

    def skip(self) -> None:
        """After `load`: as if the step had brought nothing."""
        self.clear_gradients()
        self.buffers.skip()

    def clear_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        self.has_gradients = False

    def first_non_finite(self, kept: KeptMean) -> str:
        """What is not finite in the step's mean, in words; empty: all is. The same to all ranks of a group."""
        return self.agree(self._first_non_finite(kept))

    def _first_non_finite(self, kept: KeptMean) -> str:
        """One pass at the speed of memory: a sum with an infinity or a NaN in it is one. A sum that is too large for
        its dtype is one, too, and then every tensor is looked at.
        """
        buffers = False
        for section in self._sections(kept):
            buffers = buffers or not _has_finite_sum(section.buffers)
            if _has_finite_sum(section.gradients):
                continue
            views = kept.layout.views(kept.memory)
            for index in section.entries:
                if not torch.isfinite(views[index]).all():
                    return f"the gradient of {self._names[id(self._trained[index])]!r}"
        name = self.buffers.first_non_finite(self._suspects(kept)) if buffers else ""
        return f"the buffer {name!r}" if name else ""

    def is_zero(self, kept: KeptMean) -> bool:
        """Whether every gradient of a mean is, where it was added up."""
        return not any(bool(section.gradients.any()) for section in self._sections(kept))

    def _suspects(self, kept: KeptMean) -> list[int]:
        """Buffers that may not be finite. To look at one on a device is to wait, so its mean is looked at before."""
        present = self._buffers_in(kept)
        if self.device is None:
            return present
        means = kept.layout.views(kept.memory)[len(self._trained) :]
        return [number for number in present if not torch.isfinite(means[number]).all()]

    def _buffers_in(self, kept: KeptMean) -> list[int]:
        first = len(self._trained)
        return [index - first for index in sorted(kept.present) if index >= first]

    def _name_of(self, parameter: torch.Tensor) -> str:
        return self._names[id(parameter)]

    def _sections(self, kept: KeptMean) -> list[_Summed]:
        key = kept.memory.data_ptr()
        if self._summed is None or self._summed[0] != key or self._summed[1] is not kept.layout:
            found = []
            for section, vector in zip(kept.layout.sections, kept.layout.vectors(kept.memory), strict=True):
                count, end = kept.layout.gradients_in(section)
                found.append(_Summed(vector[:end], section.entries[:count], vector[end:]))
            self._summed = (key, kept.layout, found)
        return self._summed[2]


def _has_finite_sum(vector: torch.Tensor) -> bool:
    if not vector.numel():
        return True
    narrow = vector.dtype in (torch.float16, torch.bfloat16)
    return cmath.isfinite(vector.sum(dtype=torch.float32 if narrow else None).item())


def _check(parameters: list[torch.nn.Parameter]) -> None:
    if not parameters:
        raise ConfigError("the model has no parameters", hint="pass the module that the optimizer trains")
    for parameter in parameters:
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            raise ConfigError(
                "the model has lazy parameters that have no shape yet",
                hint="run one forward pass before holdfast.join",
            )
