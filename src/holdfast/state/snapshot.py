"""A snapshot is the state at a step, in memory; a `Holder` takes it from live objects and puts it back.

Invariants:
- `capture` refers to parameters and optimizer state and does not copy them: they change only in
  `optimizer.step()`, so another thread may read the snapshot until then, and nobody after that. What may change
  during a step (buffers, hyperparameters, everything in `extras`) is copied.
- Tensors of a device stay there. `on_host` brings them here as they were when the snapshot was taken, in the thread
  that asks, which alone waits: the state may change again when that has returned.
- `restore` keeps the identity of every parameter and buffer, and checks the whole snapshot before it writes.
- After `restore(s)`, `capture(s.step).digest() == s.digest()`.

A Holder belongs to the thread that runs the user's loop. A Snapshot is immutable and may be shared.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from holdfast.core.errors import ConfigError, ProtocolError
from holdfast.devices.copies import CPU, as_of, mark_on, on
from holdfast.state.codec import InOrder, Tree, flatten, pack_tree, unflatten, unpack_tree
from holdfast.state.digest import state_digest
from holdfast.state.extras import Stateful, capture_extra, check_kinds, refer_to_extra, restore_extra
from holdfast.state.flags import ModuleFlags
from holdfast.state.layout import TensorSpec, allocate, dense, dtype_name, spec_of
from holdfast.state.local import local, sharding_modules
from holdfast.state.naming import named_buffers, named_parameters, plain_name
from holdfast.state.optimizer import (
    AddedGroups,
    Optimizers,
    capture_optimizers,
    check_optimizers,
    copied,
    restore_optimizers,
)
from holdfast.state.space import Space

_PARTS = ("parameters", "requires_grad", "buffers", "flags", "modules", "optimizer", "extras")
_SAME_SCRIPT = "every worker of a run must build the same model, optimizer and extras before holdfast.join"


class StepBuffers(Protocol):
    """A model's buffers as a step sees them. Caches, which follow from what comes, are not among them."""

    def base(self) -> Mapping[str, torch.Tensor]:
        """As they were when the current step began, by name."""

    def to_restore(self) -> Mapping[str, torch.Tensor]:
        """The live tensors that a state is written into."""


@dataclass(eq=False)
class Snapshot:
    """The state at `step`: a packed tree and the tensors it numbers. Immutable by agreement."""

    step: int
    tree: bytes
    tensors: tuple[torch.Tensor, ...]
    _chunks: dict[tuple[int, int], bytes] = field(default_factory=dict, repr=False)  # digests, once computed
    _taken: torch.Event | None = field(default=None, repr=False)  # on the device on which some of the tensors are
    _twin: Snapshot | None = field(default=None, init=False, repr=False)
    _near: dict[int, torch.Tensor] = field(default_factory=dict, init=False, repr=False)  # brought by one thread
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False, repr=False)
    _digest: str = field(default="", init=False, repr=False)

    @property
    def nbytes(self) -> int:
        """Of the tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors)

    @classmethod
    def taken(cls, step: int, tree: bytes, tensors: Sequence[torch.Tensor]) -> Snapshot:
        """Of tensors as they are where this thread is now in what it gives to their device."""
        device = next((tensor.device for tensor in tensors if tensor.device != CPU), None)
        return cls(step, tree, tuple(tensors), _taken=mark_on(device) if device is not None else None)

    def copied(self) -> Snapshot:
        """With memory of its own: what it was taken of may change."""
        return Snapshot.taken(self.step, self.tree, [tensor.clone() for tensor in self.tensors])

    def on_host(self) -> Snapshot:
        """Itself, or its twin in this process's memory. Waits for a device; may be asked in any thread."""
        if self._taken is None:
            return self
        with self._lock:
            if self._twin is None:
                self._twin = Snapshot(self.step, self.tree, tuple(as_of(self._taken, self.tensors)), self._chunks)
            return self._twin

    def some_on_host(self, numbers: Set[int]) -> tuple[torch.Tensor, ...]:
        """Its tensors, of which at least those of these numbers are in this process's memory."""
        if self._taken is None:
            return self.tensors
        missing = sorted(numbers - self._near.keys())
        self._near.update(zip(missing, as_of(self._taken, [self.tensors[number] for number in missing]), strict=True))
        return tuple(self._near.get(number, tensor) for number, tensor in enumerate(self.tensors))

    def chunk_digests(self) -> dict[tuple[int, int], bytes]:
        """The digest of each chunk of the tensors' memory, computed at the first call and then kept."""
        if not self._chunks:
            space = Space(self.on_host().tensors)
            self._chunks.update({chunk: space.digest(*chunk) for chunk in space.chunks()})
        return self._chunks

    def digest(self) -> str:
        """Of everything: step, tree, and the tensors as they lie in memory. Kept after the first call."""
        if not self._digest:
            self._digest = state_digest(self)
        return self._digest


class States(Protocol):
    """What is saved, and restored: one worker's, or of a group what all its ranks have together."""

    def capture(self, step: int) -> Snapshot: ...

    def state_bytes(self) -> int: ...

    def restore(self, snapshot: Snapshot, *, adopt: bool = False) -> None: ...


class Holder:
    """Captures and restores the state of one worker: model, optimizer (or several by name) and `extras`.

    `buffers`, where given, are those of a training loop; else they are taken from the model as they are.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizers,
        extras: Mapping[str, Stateful] | None = None,
        *,
        buffers: StepBuffers | None = None,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._extras = dict(extras or {})
        self._buffers = buffers
        self._sharding = sharding_modules(model)
        self._flags = ModuleFlags(model)
        self._added = AddedGroups()
        check_kinds(self._extras)

    def capture(self, step: int, *, of: Callable[[torch.Tensor], torch.Tensor] = local) -> Snapshot:
        """The state as of now, which is the state after `step` steps. Call it between two optimizer steps. `of`: what
        is taken of tensors that are sharded over a group."""
        return self._taken(step, copied, lambda module: InOrder(copied(module.get_extra_state())), capture_extra, of)

    def state_bytes(self) -> int:
        return self.capture(0).nbytes

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        for module in self._sharding:
            module.reshard()
        return named_parameters(self._model)

    def refer(self, step: int) -> Snapshot:
        """Like `capture`, but nothing is copied: to be read at once, in this thread."""
        return self._taken(step, dict, lambda module: module.get_extra_state(), refer_to_extra)

    def _taken(
        self,
        step: int,
        buffers: Callable[[dict[str, torch.Tensor]], Any],
        of_module: Callable[[torch.nn.Module], Any],
        of_extra: Callable[[Stateful], Any],
        of: Callable[[torch.Tensor], torch.Tensor] = local,
    ) -> Snapshot:
        parameters = self.parameters()
        state = {
            "parameters": parameters,
            "requires_grad": {name: value.requires_grad for name, value in parameters.items()},
            "buffers": buffers(dict(self._buffers.base() if self._buffers else named_buffers(self._model))),
            "flags": self._flags.changes(),
            "modules": {name: of_module(module) for name, module in self._speaking_modules()},
            "optimizer": capture_optimizers(self._optimizer, parameters),
            "extras": {name: of_extra(extra) for name, extra in self._extras.items()},
        }
        tree, tensors = flatten(state, sort=True, anywhere=True, of=of)
        return Snapshot.taken(step, pack_tree(tree), tensors)

    def place(self, tree: bytes, specs: Sequence[TensorSpec]) -> list[torch.Tensor]:
        """Where a snapshot's tensors may be received: parameters where they live, everything else in new memory.

        Pages of new memory cost as much as the bytes that come, so as little as can be is new.
        """
        places: list[torch.Tensor | None] = [None] * len(specs)
        numbers = _parameter_numbers(unpack_tree(tree))
        for name, parameter in named_parameters(self._model).items():
            index = numbers.get(name, -1)
            if 0 <= index < len(specs) and parameter.device.type == "cpu" and places[index] is None:
                live = local(parameter).detach()
                if dense(live, name).data_ptr() == live.data_ptr() and spec_of(live) == specs[index]:
                    places[index] = live
        for index, tensor in enumerate(places):
            if tensor is None:
                (places[index],) = allocate([specs[index]])
        return [tensor for tensor in places if tensor is not None]

    def restore(self, snapshot: Snapshot, *, adopt: bool = False) -> None:
        """Makes this worker's state that of the snapshot, bit for bit. ConfigError if it is of another model.

        `adopt`: the snapshot's tensors are nobody else's, and may become the optimizer's own.
        """
        state = unflatten(unpack_tree(snapshot.tree), snapshot.tensors)
        if not isinstance(state, dict) or tuple(sorted(state)) != tuple(sorted(_PARTS)):
            raise ProtocolError("the snapshot does not have the parts of a training state")
        if not all(isinstance(part, dict) for part in state.values()):
            raise ProtocolError("a part of the snapshot is not a dict")
        parameters = self.parameters()
        parts = {name: local(parameter) for name, parameter in parameters.items()}
        buffers = dict(self._buffers.to_restore() if self._buffers else named_buffers(self._model))
        modules = dict(self._speaking_modules())
        _check_tensors("parameter", state["parameters"], parts)
        _check_tensors("buffer", state["buffers"], buffers)
        _check_names("parameter", state["requires_grad"], parameters)
        _check_names("module with extra state", state["modules"], modules)
        _check_names("extra", state["extras"], self._extras)
        check_optimizers(state["optimizer"], self._optimizer, parameters)

        with torch.no_grad():
            for name, parameter in parameters.items():
                if parts[name].data_ptr() != state["parameters"][name].data_ptr():
                    parts[name].copy_(on(state["parameters"][name], parts[name].device))
                parameter.requires_grad_(bool(state["requires_grad"][name]))
            for name, buffer in buffers.items():
                _write(buffer, state["buffers"][name])
        self._flags.restore(state["flags"])
        for name, module in modules.items():
            module.set_extra_state(copied(state["modules"][name]))
        restore_optimizers(state["optimizer"], self._optimizer, parameters, self._added, adopt=adopt)
        # Last: a scheduler may write to the optimizer when it is loaded, and then means to.
        for name, extra in self._extras.items():
            restore_extra(name, extra, state["extras"][name])

    def as_the_script_built_it(self) -> None:
        """Before lines that the run has been through: optimizers with the groups that the script gave them."""
        self._added.take_out()

    def _speaking_modules(self) -> list[tuple[str, torch.nn.Module]]:
        """Modules with state of their own beside tensors (`get_extra_state`)."""
        silent = torch.nn.Module.get_extra_state
        return [
            (plain_name(name), module)
            for name, module in self._model.named_modules()
            if type(module).get_extra_state is not silent
        ]


def _parameter_numbers(tree: Tree) -> dict[str, int]:
    """Name to tensor number, as far as the tree of a snapshot has them where `capture` puts them."""
    numbers: dict[str, int] = {}
    try:
        for name, value in dict(tree["d"])["parameters"]["d"]:
            if type(name) is str and type(value.get("T")) is int:
                numbers[name] = value["T"]
    except (AttributeError, KeyError, TypeError, ValueError):
        pass  # `restore` says what is wrong with it
    return numbers


def _check_names(what: str, sent: Mapping[str, Any], mine: Mapping[str, Any]) -> None:
    article = "an" if what.startswith("e") else "a"
    for name in sent:
        if name not in mine:
            raise ConfigError(f"the run has {article} {what} {name} that this worker does not have", hint=_SAME_SCRIPT)
    for name in mine:
        if name not in sent:
            raise ConfigError(f"this worker has {article} {what} {name} that the run does not have", hint=_SAME_SCRIPT)


def _check_tensors(what: str, sent: Mapping[str, Any], mine: Mapping[str, torch.Tensor]) -> None:
    _check_names(what, sent, mine)
    for name, tensor in mine.items():
        other = sent[name]
        if not isinstance(other, torch.Tensor):
            raise ProtocolError(f"the snapshot's {what} {name} is not a tensor")
        if tensor.shape != other.shape:
            difference = f"shape {tuple(other.shape)} in the run and {tuple(tensor.shape)} here"
        elif tensor.dtype != other.dtype:
            difference = f"dtype {dtype_name(other.dtype)} in the run and {dtype_name(tensor.dtype)} here"
        elif what == "parameter" and spec_of(dense(tensor, name)) != spec_of(other):
            # Kernels choose their path by strides: the next step would have other bits.
            difference = "another memory format in the run than here"
        else:
            continue
        raise ConfigError(f"the {what} {name} has {difference}", hint=_SAME_SCRIPT)


def _write(buffer: torch.Tensor, value: torch.Tensor) -> None:
    if any(stride == 0 and size > 1 for stride, size in zip(buffer.stride(), buffer.shape, strict=True)):
        # An expanded buffer has one cell for many elements; it gets memory of its own, and stays the same object.
        buffer.data = value.to(buffer.device, copy=True)
    else:
        buffer.copy_(on(value, buffer.device))
