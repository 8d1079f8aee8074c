"""The exact mode's hold on a model: what a shard leaves behind is collected, what a step decides is put back.

Owns the gradients and buffers of the user's model between the user's lines. Around each shard: buffers start from
the step's first values, gradients from nothing. After the reduction: `.grad` is the mean over all shards, a copy that
the user may clip or zero, and buffers are the mean of what the shards made of them.
"""

from __future__ import annotations

import cmath
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from holdfast.core.errors import ConfigError
from holdfast.reduce.layout import Layout, Section
from holdfast.reduce.reduction import Kept


class Collector(Protocol):
    """Where a shard's tensors go: into the sums, or to whoever compares them."""

    def add(self, shard: int, tensors: Sequence[torch.Tensor | None], present: Iterable[int]) -> None: ...


class Nowhere:
    """For a shard that came too late: nobody waited for it."""

    def add(self, shard: int, tensors: Sequence[torch.Tensor | None], present: Iterable[int]) -> None:
        pass


NOWHERE = Nowhere()


class Exact:
    """Collects and loads. Belongs to the thread that runs the user's loop."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.parameters = list(model.parameters())  # a shared parameter once
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        _check(self.parameters)
        self._buffers = _buffers_of(model)
        self._live = [buffer.tensor for buffer in self._buffers]
        self._base = [tensor.detach().clone() for tensor in self._live]
        self._sums_like = [_wide(tensor) for tensor in self._base]
        self._dirty: set[int] = set()  # buffers that the last shard has changed
        self._layouts: dict[tuple[bool, ...], tuple[Layout, list[int]]] = {}
        self._trained: list[torch.nn.Parameter] = []
        self._frozen: list[torch.nn.Parameter] = []
        self._layout: Layout | None = None
        self._loaded: tuple[int, Layout, list[torch.Tensor]] | None = None
        self._ends: tuple[Layout, list[tuple[int, int]]] | None = None  # of the gradients in each section
        self.has_gradients = False  # of the step that was loaded last

    def whole_layout(self) -> Layout:
        """With every parameter trained: the most room a slot can need."""
        return Layout([*self.parameters, *self._sums_like])

    def base_buffers(self) -> Mapping[str, torch.Tensor]:
        """The buffers as they were when the step began."""
        return {buffer.name: base for buffer, base in zip(self._buffers, self._base, strict=True)}

    def rebase(self) -> None:
        """Whatever the buffers are now is where the next step starts."""
        if self._live:
            with torch.no_grad():
                self._put_back(keep_values=True)
                torch._foreach_copy_(self._base, self._live)
        self._dirty.clear()

    def layout(self) -> Layout:
        """For the parameters that are trained now. The same for all workers, whose scripts do the same."""
        flags = tuple([parameter.requires_grad for parameter in self.parameters])
        found = self._layouts.get(flags)
        if found is None:
            trained = [index for index, flag in enumerate(flags) if flag]
            tensors = [self.parameters[index] for index in trained]
            found = self._layouts[flags] = (Layout([*tensors, *self._sums_like]), trained)
        self._layout, trained = found
        self._trained = [self.parameters[index] for index in trained]
        self._frozen = [parameter for parameter, flag in zip(self.parameters, flags, strict=True) if not flag]
        return self._layout

    def before_shard(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        if self._dirty:
            with torch.no_grad():
                self._put_back(keep_values=False)
                dirty = sorted(self._dirty)
                torch._foreach_copy_([self._live[at] for at in dirty], [self._base[at] for at in dirty])
            self._dirty.clear()

    def after_shard(self, shard: int, sums: Collector) -> None:
        with torch.no_grad():
            tensors: list[torch.Tensor | None] = [parameter.grad for parameter in self._trained]
            present = [index for index, tensor in enumerate(tensors) if tensor is not None]
            if len(present) < len(tensors) or self._frozen:
                self._check_gradients()
            first = len(tensors)
            for offset, (buffer, base) in enumerate(zip(self._buffers, self._base, strict=True)):
                live = buffer.now()
                if not _same_bits(live, base):
                    present.append(first + offset)
                    self._dirty.add(offset)
                tensors.append(live)
            sums.add(shard, tensors, present)

    def _check_gradients(self) -> None:
        if any(parameter.grad is not None for parameter in self._frozen):
            raise ConfigError(
                "a parameter that was frozen when the step began has a gradient",
                hint="set requires_grad before `for batch in step:`, so that all shards train the same parameters",
            )
        if any(parameter.grad is not None and parameter.grad.is_sparse for parameter in self._trained):
            raise ConfigError(
                "a gradient is sparse, and sparse gradients cannot be summed in a fixed order",
                hint="build the embedding with sparse=False",
            )

    def _put_back(self, *, keep_values: bool) -> None:
        """Where a forward has assigned another tensor to a buffer (`self.mean = ...`), the first one comes back."""
        for buffer in self._buffers:
            live = buffer.now()
            if live is not buffer.tensor:
                if keep_values:
                    buffer.tensor.copy_(live)
                buffer.owner._buffers[buffer.key] = buffer.tensor

    def load(self, kept: Kept) -> None:
        """Put the mean of a step where the user's lines expect it."""
        views = self._views(kept)
        with torch.no_grad():
            grads: list[torch.Tensor] = []
            means: list[torch.Tensor] = []
            for parameter in self._frozen:
                parameter.grad = None  # of a step before it was frozen, on a worker that has no shards in this one
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
            self.has_gradients = bool(grads)
            first = len(self._trained)
            self._put_back(keep_values=False)
            for offset, (live, base) in enumerate(zip(self._live, self._base, strict=True)):
                if first + offset in kept.present:
                    live.copy_(views[first + offset])
                elif offset in self._dirty:
                    live.copy_(base)
        self._dirty.clear()

    def skip(self) -> None:
        """After `load`: as if the step had brought nothing."""
        self.clear_gradients()
        if self._live:
            with torch.no_grad():
                self._put_back(keep_values=False)
                torch._foreach_copy_(self._live, self._base)
        self._dirty.clear()

    def clear_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
        self.has_gradients = False

    def first_non_finite(self, kept: Kept) -> str:
        """The parameter whose mean gradient is not finite; empty: all are.

        One pass at the speed of memory: a sum with an infinity or a NaN in it is one. A sum that is too large for its
        dtype is one, too, and then every tensor is looked at.
        """
        sections = kept.layout.sections
        if self._ends is None or self._ends[0] is not kept.layout:
            self._ends = (kept.layout, [_gradients_in(section, len(self._trained)) for section in sections])
        vectors = kept.layout.vectors(kept.memory)
        for section, vector, (count, end) in zip(sections, vectors, self._ends[1], strict=True):
            narrow = section.dtype in (torch.float16, torch.bfloat16)
            if not count or cmath.isfinite(vector[:end].sum(dtype=torch.float32 if narrow else None).item()):
                continue
            views = self._views(kept)
            for index in section.entries[:count]:
                if not torch.isfinite(views[index]).all():
                    return self._names[id(self._trained[index])]
        return ""

    def _views(self, kept: Kept) -> list[torch.Tensor]:
        key = kept.memory.data_ptr()
        if self._loaded is None or self._loaded[0] != key or self._loaded[1] is not kept.layout:
            self._loaded = (key, kept.layout, kept.layout.views(kept.memory))
        return self._loaded[2]


@dataclass
class _Buffer:
    """Where a buffer lives, and the tensor that it was at first and always is again between shards."""

    name: str
    owner: torch.nn.Module
    key: str
    tensor: torch.Tensor

    def now(self) -> torch.Tensor:
        """What the user's code has made of it, in place or by assignment."""
        tensor = self.owner._buffers.get(self.key)
        if tensor is self.tensor:
            return tensor
        if tensor is not None and tensor.shape == self.tensor.shape and tensor.dtype == self.tensor.dtype:
            return tensor
        if self.key in self.owner._non_persistent_buffers_set:
            # A cache that grows with what comes (rotary embeddings): it follows from its input, and is left alone.
            self.owner = _Nowhere(self.key, self.tensor)
            return self.tensor
        raise ConfigError(
            f"the buffer {self.name} got another shape or dtype during the step",
            hint="keep its shape, or register it with persistent=False if it is a cache that needs no mean over shards",
        )


class _Nowhere(torch.nn.Module):
    """The home of a buffer that is no longer in the model."""

    def __init__(self, key: str, tensor: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer(key, tensor)


def _buffers_of(model: torch.nn.Module) -> list[_Buffer]:
    """Each tensor once, under the name that `named_buffers` gives it."""
    found: dict[int, _Buffer] = {}
    for prefix, module in model.named_modules():
        for key, tensor in module._buffers.items():
            if tensor is not None and id(tensor) not in found:
                found[id(tensor)] = _Buffer(f"{prefix}.{key}" if prefix else key, module, key, tensor)
    return list(found.values())


def _gradients_in(section: Section, trained: int) -> tuple[int, int]:
    """How many of a section's tensors are gradients, and where they end: buffers come after them."""
    count = sum(index < trained for index in section.entries)
    return count, section.starts[count] if count < len(section.starts) else section.elements


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """What its sum over shards is kept in: a sum of small integers does not fit into a small integer."""
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool:
        return tensor
    return torch.empty(tensor.shape, dtype=torch.int64, device="meta")


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """0.0 and -0.0 are equal, NaN is not equal to itself: neither says whether a shard has written here."""
    if one.dtype.is_complex:
        one, other = torch.view_as_real(one.resolve_conj()), torch.view_as_real(other.resolve_conj())
    bits = _BITS[one.element_size()]
    return torch.equal(one.view(bits), other.view(bits))


def _check(parameters: list[torch.nn.Parameter]) -> None:
    if not parameters:
        raise ConfigError("the model has no parameters", hint="pass the module that the optimizer trains")
    for parameter in parameters:
        if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
            raise ConfigError(
                "the model has lazy parameters that have no shape yet",
                hint="run one forward pass before holdfast.join",
            )
