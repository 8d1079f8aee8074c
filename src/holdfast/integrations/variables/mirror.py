"""A framework's variables as the step engine sees them: a torch module with the same bits, and an optimizer for it.

    trainable variables         parameters, whose .grad takes what a shard computed and gives back the mean
    frozen weights              parameters without a gradient
    other variables             buffers: each shard starts from the step's first values, the step ends with the mean
    metrics                     buffers, too: what the shards add to them is summed
    generators (Keras' seeds)   no state: they are set wherever the engine seeds, from the step and the shard
    the optimizer's variables   an extra, read when a snapshot is taken

The framework's variables are the truth while the user's lines run, and the mirror while the engine works. So values are
copied at these moments, and only then: before a shard, after it, when the mean is there, and when a step's lines are
done. A state that was restored is written to the variables when the extra is loaded, which comes last.
Belongs to the thread of the user's loop.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from holdfast.core.errors import ConfigError
from holdfast.data.seeding import derive_seed
from holdfast.integrations.variables.port import Framework

OPTIMIZER = "holdfast.optimizer"  # our own part of a snapshot's extras
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, kw_only=True)
class Variables:
    """What there is to train, in the framework's own objects."""

    trainable: Sequence[Any]
    frozen: Sequence[Any] = ()
    others: Sequence[Any] = ()
    metrics: Sequence[Any] = ()
    generators: Sequence[Any] = ()
    optimizer: Any = None  # with `variables`; built
    extras: Mapping[str, Sequence[Any]] = field(default_factory=dict)


class MirrorModule(torch.nn.Module):
    """Named as the variables are."""

    def __init__(self, framework: Framework, variables: Variables) -> None:
        super().__init__()
        names = _Names()
        for one in variables.trainable:
            self.register_parameter(names.of(one), _parameter(framework, one, trained=True))
        for one in variables.frozen:
            self.register_parameter(names.of(one), _parameter(framework, one, trained=False))
        for one in variables.others:
            tensor = framework.tensor(one)
            self.register_buffer(names.of(one), tensor if framework.shares else tensor.detach().clone())
        for one in variables.metrics:  # always memory of their own: a shard begins with none of what was added before
            self.register_buffer(names.of(one), framework.tensor(one).detach().clone())


class MirrorOptimizer(torch.optim.Optimizer):
    """Stands for the framework's optimizer. Its step takes over what that one has done to the variables."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], take: Callable[[], None]) -> None:
        super().__init__(list(parameters), {})
        self._take = take

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self._take()


class VariableState:
    """Some variables as an extra: anything with state_dict and load_state_dict travels with the snapshot."""

    def __init__(self, framework: Framework, variables: Sequence[Any], kind: str = "") -> None:
        names = _Names()
        self._framework = framework
        self._variables = {names.of(one): one for one in variables}
        self._kind = kind

    def state_dict(self) -> dict[str, Any]:
        read = self._framework.tensor
        return {"kind": self._kind, "variables": {name: read(one).detach() for name, one in self._variables.items()}}

    def load_state_dict(self, state: Any) -> None:
        if state["kind"] != self._kind:
            raise ValueError(f"the run's optimizer is {state['kind']}, and this worker's is {self._kind}")
        sent = state["variables"]
        if set(sent) != set(self._variables):
            raise ValueError(f"it has other variables: {', '.join(sorted(set(sent) ^ set(self._variables))[:3])}")
        for name, one in self._variables.items():
            self._framework.write(one, sent[name])


class _OptimizerState(VariableState):
    """Loaded last of a snapshot: the mirror has the state's values by then, and the variables get them."""

    def __init__(self, mirror: Mirror) -> None:
        optimizer = mirror.variables.optimizer
        super().__init__(mirror.framework, optimizer.variables, type(optimizer).__name__)
        self._mirror = mirror

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self._mirror.give_all()


class Mirror:
    """See the module. `shards` is the run's number of them."""

    def __init__(self, framework: Framework, variables: Variables, *, shards: int, seed: int) -> None:
        self.framework = framework
        self.variables = variables
        self.module = MirrorModule(framework, variables)
        parameters = list(self.module.parameters())
        self.trained = parameters[: len(variables.trainable)]
        self.optimizer = MirrorOptimizer(self.trained, self._take_parameters)
        self.extras = {
            OPTIMIZER: _OptimizerState(self),
            **{name: VariableState(framework, some) for name, some in variables.extras.items()},
        }
        self._parameters = list(zip(parameters, (*variables.trainable, *variables.frozen), strict=True))
        buffers = list(self.module.buffers())
        self._others = list(zip(buffers[: len(variables.others)], variables.others, strict=True))
        self._metrics = list(zip(buffers[len(variables.others) :], variables.metrics, strict=True))
        self._zeros = [torch.zeros_like(buffer) for buffer, _ in self._metrics]
        self._shards = shards
        self._seed = seed
        self._versions: list[int] = []  # of the parameters, when they were taken

    # ---- around a shard

    def begin_shard(self, place: tuple[int, int]) -> None:
        """The mirror's buffers have the step's first values."""
        self._give(self._others)
        for (_, variable), zero in zip(self._metrics, self._zeros, strict=True):
            self.framework.write(variable, zero)
        self.seed(*place)

    def contribute(self, gradients: Sequence[Any]) -> None:
        """What the shard's loss says of each trainable variable; None: nothing."""
        if len(gradients) != len(self.trained):
            raise ConfigError(
                f"{len(gradients)} gradients were given for {len(self.trained)} trainable variables",
                hint="give one for each variable that join knows, in their order, and None where there is none",
            )
        if self.framework.shares:
            for one, grad in zip(self.trained, gradients, strict=True):
                one.grad = grad
            return
        given = [(one, grad) for one, grad in zip(self.trained, gradients, strict=True) if grad is not None]
        with torch.enable_grad():
            torch.autograd.backward([one for one, _ in given], [self.framework.tensor(grad) for _, grad in given])

    def end_shard(self) -> None:
        self._take(self._others)
        with torch.no_grad():
            for buffer, variable in self._metrics:
                buffer.add_(self.framework.tensor(variable), alpha=self._shards)

    # ---- around a step

    def reduced(self, step: int) -> None:
        """The mean is in the mirror: in .grad and in the buffers."""
        self._give(self._others)
        self._give(self._metrics)
        self.seed(step, "apply")

    def mean(self) -> list[Any]:
        """Of the gradients, for the framework's optimizer."""
        return [None if one.grad is None else self.framework.value(one.grad) for one in self.trained]

    def take_all(self) -> None:
        """The user's lines for a step are done."""
        self._take_parameters()
        self._take(self._others)
        self._take(self._metrics)

    def give_all(self) -> None:
        for parameter, variable in self._parameters:
            self._write(variable, parameter)
        self._give(self._others)
        self._give(self._metrics)

    def seed(self, *place: int | str) -> None:
        """The framework's generators, as the engine has done with those that it knows."""
        number = derive_seed(self._seed, *place)
        self.framework.seed(number)
        for index, generator in enumerate(self.variables.generators):
            words = torch.tensor([derive_seed(number, "generator", index) & 0x7FFF_FFFF, 0])
            self.framework.write(generator, words.to(self.framework.tensor(generator).dtype))

    def begin_step(self, step: int) -> None:
        """What somebody has done to the mirror's parameters since the last step, such as a drill, is done to all."""
        for (parameter, variable), version in zip(self._parameters, self._versions, strict=False):
            if parameter._version != version:
                self._write(variable, parameter)
        self.seed(step, "begin")

    def _take_parameters(self) -> None:
        self._take(self._parameters)
        self._versions = [parameter._version for parameter, _ in self._parameters]

    def _take(self, pairs: Sequence[tuple[torch.Tensor, Any]]) -> None:
        with torch.no_grad():
            for tensor, variable in pairs:
                if (value := self.framework.tensor(variable)) is not tensor:
                    tensor.copy_(value)

    def _give(self, pairs: Sequence[tuple[torch.Tensor, Any]]) -> None:
        for tensor, variable in pairs:
            self._write(variable, tensor)

    def _write(self, variable: Any, tensor: torch.Tensor) -> None:
        """Only where it is another: to read is cheaper, and what is assigned may be copied once more."""
        value = self.framework.tensor(variable)
        if value is not tensor and not _same_bits(value, tensor):
            self.framework.write(variable, tensor)


class _Names:
    """Of variables, each once, in words that a torch module takes."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def of(self, variable: Any) -> str:
        said = str(getattr(variable, "path", None) or getattr(variable, "name", None) or "variable")
        first = name = said.removesuffix(":0").replace(".", "_")
        number = 1
        while name in self._taken:
            number += 1
            name = f"{first}~{number}"
        self._taken.add(name)
        return name


def _parameter(framework: Framework, variable: Any, *, trained: bool) -> torch.nn.Parameter:
    tensor = framework.tensor(variable)
    if framework.shares:
        assert isinstance(tensor, torch.nn.Parameter)
        return tensor
    floats = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return torch.nn.Parameter(tensor.detach().clone(), requires_grad=trained and floats)


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    bits = _BITS.get(one.element_size())
    if bits is None or one.dtype != other.dtype:
        return False
    return torch.equal(one.detach().contiguous().view(bits), other.detach().contiguous().view(bits))
