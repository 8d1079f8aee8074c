"""The state of one slice, as each of its replicas holds it: parameters, optimizer, and how many updates are applied.

Replicas apply the same updates in the same order, on the same arithmetic, and so have the same bits; `digest` compares
them. Owned by one thread of a server. Knows nothing of logs, messages or workers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from holdfast.core.errors import ProtocolError
from holdfast.core.words import encode_json
from holdfast.servers.recipe import GroupRecipe, Settings, settled
from holdfast.state.codec import flatten
from holdfast.state.digest import digest_tensors
from holdfast.state.optimizer import AddedGroups, capture_optimizers, check_optimizers, restore_optimizers

BLOCK_ELEMENTS = 1 << 16  # looked at at once for numbers that are not finite: fits a core's cache


class SliceState:
    """`values`: the slice's segments, flat, which this object owns from now on; `groups`: the group of each."""

    def __init__(self, values: Sequence[torch.Tensor], groups: Sequence[int], recipes: Sequence[GroupRecipe]) -> None:
        assert len(values) == len(groups) and all(value.dim() == 1 for value in values)
        self.updates = 0  # applied so far
        self._segments = [torch.nn.Parameter(value) for value in values]
        self._names = {str(number): segment for number, segment in enumerate(self._segments)}
        self._optimizers: dict[str, torch.optim.Optimizer] = {}  # by the number of the group
        for number, recipe in enumerate(recipes):
            mine = [segment for segment, group in zip(self._segments, groups, strict=True) if group == number]
            if mine:
                self._optimizers[str(number)] = recipe.build(mine)

    @property
    def values(self) -> list[torch.Tensor]:
        """The parameters, by reference: they change with the next update."""
        return [segment.detach() for segment in self._segments]

    def apply(self, gradients: Sequence[torch.Tensor | None], settings: Sequence[Settings]) -> None:
        """One update. `gradients`: of each segment, None where the worker had none; `settings`: of all groups.

        ProtocolError, with nothing changed, for what does not fit this slice.
        """
        if len(gradients) != len(self._segments):
            raise ProtocolError(f"an update with {len(gradients)} segments, and the slice has {len(self._segments)}")
        for segment, gradient in zip(self._segments, gradients, strict=True):
            if gradient is not None and (gradient.shape != segment.shape or gradient.dtype != segment.dtype):
                raise ProtocolError("an update whose segments are not those of the slice")
        told = {number: self._settings(number, settings) for number in self._optimizers}
        for number, optimizer in self._optimizers.items():
            optimizer.param_groups[0].update(told[number])
        for segment, gradient in zip(self._segments, gradients, strict=True):
            segment.grad = gradient
        for optimizer in self._optimizers.values():
            optimizer.step()
        for segment in self._segments:
            segment.grad = None
        self.updates += 1

    def _settings(self, number: str, settings: Sequence[Settings]) -> dict[str, Any]:
        if int(number) >= len(settings):
            raise ProtocolError(f"an update with the settings of {len(settings)} groups, and the run has more")
        told = settled(settings[int(number)])
        unknown = told.keys() - self._optimizers[number].param_groups[0].keys()
        if unknown:
            raise ProtocolError(f"an update that sets {sorted(unknown)[0]!r}, which the optimizer does not know")
        return told

    def capture(self) -> dict[str, Any]:
        """Everything, by reference: flatten it (state/codec.py) or copy it before the next update."""
        optimizers = capture_optimizers(self._optimizers, self._names)
        return {"updates": self.updates, "values": self.values, "optimizers": optimizers}

    def restore(self, captured: Any) -> None:
        """What `capture` returned on another replica. ProtocolError or ConfigError if it is not of this slice."""
        if not isinstance(captured, dict) or set(captured) != {"updates", "values", "optimizers"}:
            raise ProtocolError("not the state of a slice")
        values, updates = captured["values"], captured["updates"]
        if type(updates) is not int or updates < 0 or not isinstance(values, list):
            raise ProtocolError("not the state of a slice")
        if [_kind(value) for value in values] != [_kind(segment) for segment in self._segments]:
            raise ProtocolError("the state of another slice")
        check_optimizers(captured["optimizers"], self._optimizers, self._names)
        with torch.no_grad():
            for segment, value in zip(self._segments, values, strict=True):
                segment.copy_(value)
        restore_optimizers(captured["optimizers"], self._optimizers, self._names, AddedGroups())
        self.updates = updates

    def optimizer_states(self) -> list[dict[str, torch.Tensor]]:
        """What the optimizer has for each segment, by reference: nothing before the first update."""
        return [
            {name: value for name, value in self._optimizer_of(segment).items() if isinstance(value, torch.Tensor)}
            for segment in self._segments
        ]

    def _optimizer_of(self, segment: torch.nn.Parameter) -> dict[str, Any]:
        for optimizer in self._optimizers.values():
            if segment in optimizer.state:
                return dict(optimizer.state[segment])
        return {}

    def give_optimizer_states(self, states: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """What `optimizer_states` returned of another one that has these segments; copied."""
        owners = {id(mine): one for one in self._optimizers.values() for mine in one.param_groups[0]["params"]}
        for segment, state in zip(self._segments, states, strict=True):
            if state:
                owners[id(segment)].state[segment] = {name: value.clone() for name, value in state.items()}

    def digest(self) -> str:
        """Two replicas that have applied the same updates have the same."""
        tree, tensors = flatten(self.capture(), sort=True)
        named = [(str(number), tensor) for number, tensor in enumerate(tensors)]
        plain = torch.frombuffer(bytearray(encode_json({"tree": tree})), dtype=torch.uint8)
        return digest_tensors([("tree", plain), *named])


def _kind(value: Any) -> tuple[Any, ...]:
    return (value.shape, value.dtype) if isinstance(value, torch.Tensor) else (type(value).__name__,)


def first_not_finite(gradients: Sequence[torch.Tensor | None]) -> int | None:
    """The first segment with a number that is not finite; None: there is none. Without a copy of the update."""
    for number, gradient in enumerate(gradients):
        if gradient is None or not gradient.is_floating_point():
            continue
        for block in torch.split(gradient, BLOCK_ELEMENTS):
            # A sum is not finite if one of its terms is not, and takes one pass; large terms may do the same to it.
            if not math.isfinite(block.sum().item()) and not bool(torch.isfinite(block).all()):
                return number
    return None
