"""The parameters and the optimizers' state on their way between a script's model and the servers' slices.

A script's optimizers say what the servers do, and update nothing here. Their state is filled in when a checkpoint is
saved, and is what the slices begin with when one is resumed: so a checkpoint is the same in every mode, whatever the
number of servers. Belongs to the training thread, and to the exchange while that one waits for a capture.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from holdfast.core.errors import ProtocolError
from holdfast.servers.port import Layout, Piece, layout_of
from holdfast.servers.recipe import Settings, settings_of
from holdfast.servers.slicing import Segment
from holdfast.state.naming import named_parameters
from holdfast.state.optimizer import Optimizers, by_name


class ServedState:
    """Of the parameters that an optimizer has, or that are trained when the run begins."""

    def __init__(self, model: torch.nn.Module, optimizers: Optimizers) -> None:
        self.optimizers = list(by_name(optimizers).values())
        stepped = {
            id(one) for optimizer in self.optimizers for group in optimizer.param_groups for one in group["params"]
        }
        named = named_parameters(model)
        known: Mapping[str, torch.nn.Parameter] = {
            name: one for name, one in named.items() if one.requires_grad or id(one) in stepped
        }
        self.parameters = list(known.values())
        self.layout: Layout = layout_of(known, optimizers)
        self._owners = {
            id(one): optimizer
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for one in group["params"]
        }
        self._numbers = {id(one): number for number, one in enumerate(self.parameters)}

    def staging(self) -> list[torch.Tensor]:
        """Memory of the parameters' shapes, on the host."""
        return [torch.empty(one.shape, dtype=one.dtype) for one in self.parameters]

    def load(self, staged: Sequence[torch.Tensor]) -> None:
        with torch.no_grad():
            torch._foreach_copy_(list[torch.Tensor](self.parameters), list(staged))

    def settings(self) -> list[Settings]:
        """Of all groups, as schedulers have left them."""
        return [settings_of(group) for optimizer in self.optimizers for group in optimizer.param_groups]

    def take_gradients(self, optimizer: torch.optim.Optimizer) -> dict[int, torch.Tensor]:
        """Those of this optimizer's parameters, by number. They are gone afterwards, so that it updates nothing."""
        found: dict[int, torch.Tensor] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                number = self._numbers.get(id(parameter))
                if parameter.grad is not None and number is not None:
                    found[number] = parameter.grad.detach().to("cpu").contiguous()
                parameter.grad = None
        return found

    # ---- the optimizers' state

    def initial(self, segment: Segment) -> Piece:
        """What the run begins with, of some elements: see servers/port.py."""
        parameter = self.parameters[segment.parameter]
        flat = parameter.detach().to("cpu").reshape(-1)[segment.start : segment.stop]
        state = self._owners[id(parameter)].state.get(parameter, {})
        cut: dict[str, torch.Tensor] = {}
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.numel() == parameter.numel() and value.dim():
                cut[name] = value.detach().to("cpu").reshape(-1)[segment.start : segment.stop]
            elif isinstance(value, (torch.Tensor, int, float)):
                cut[name] = torch.as_tensor(value, dtype=torch.float32).detach().to("cpu")
        return Piece(flat, cut)

    def fill_in(self, pieces: Iterable[tuple[Segment, Piece]]) -> None:
        """The model and the optimizers have the captured state from now on. ProtocolError if elements are missing.

        Each piece is put in place as it comes, into memory that the last capture has left. What fails in the middle
        leaves a mixture, which nobody may use: the next capture fills it in again, and a step loads its parameters.
        """
        states: dict[int, dict[str, torch.Tensor]] = {}
        elements = 0
        with torch.no_grad():
            for segment, piece in pieces:
                elements += segment.elements
                parameter = self.parameters[segment.parameter]
                if segment.parameter not in states:
                    kept = self._owners[id(parameter)].state.get(parameter, {})
                    states[segment.parameter] = {name: kept[name] for name in piece.optimizer if name in kept}
                state = states[segment.parameter]
                _fill(parameter, segment, piece.values)
                for name, value in piece.optimizer.items():
                    if not value.dim():
                        state[name] = value.clone()
                        continue
                    if not _fits(state.get(name), parameter, value):
                        state[name] = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
                    _fill(state[name], segment, value)
        if elements != sum(size.elements for size in self.layout.sizes):
            raise ProtocolError(f"the servers' state has {elements} elements, which is not what the model has")
        for number, state in states.items():
            parameter = self.parameters[number]
            if state:
                self._owners[id(parameter)].state[parameter] = state


def _fits(kept: object, parameter: torch.Tensor, value: torch.Tensor) -> bool:
    """What is there already has room for this piece of it, with the parameter's shape."""
    return isinstance(kept, torch.Tensor) and kept.shape == parameter.shape and kept.dtype == value.dtype


def _fill(tensor: torch.Tensor, segment: Segment, values: torch.Tensor) -> None:
    if tensor.is_contiguous():
        tensor.detach().view(-1)[segment.start : segment.stop].copy_(values)
        return
    whole = tensor.detach().reshape(-1)  # a copy: its elements lie otherwise here
    whole[segment.start : segment.stop].copy_(values)
    tensor.detach().copy_(whole.view(tensor.shape))
