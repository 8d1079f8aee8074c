"""The user's optimizers as data: which class, with which settings, for which parameters.

A server does not run the user's script, and nothing that comes over a wire is code. So a recipe names one of torch's
own optimizers, and carries its settings as plain values; the settings travel with every update, since schedulers change
them. A server builds an optimizer for the segments of its slice. That is right only for an optimizer that treats every
element by itself: `check_can_be_cut` tries it out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from holdfast.core.errors import ConfigError, ProtocolError
from holdfast.state.optimizer import Optimizers, by_name, described

Plain: TypeAlias = bool | int | float | list[float] | list[int] | None
Settings: TypeAlias = Mapping[str, Plain]
SETTINGS_MAX = 64
NAME_CHARACTERS_MAX = 64
_OURS = ("params", "param_names", "differentiable", "capturable", "foreach", "fused")  # how, not what
_FUSED = ("Adagrad", "Adam", "AdamW", "SGD")  # on a CPU several times as fast, and the same on every replica


@dataclass(frozen=True)
class GroupRecipe:
    """One parameter group of one optimizer."""

    kind: str  # a class of torch.optim
    settings: Settings

    def build(self, parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """ProtocolError for what no worker would send."""
        known = getattr(torch.optim, self.kind, None) if len(self.kind) <= NAME_CHARACTERS_MAX else None
        if not isinstance(known, type) or not issubclass(known, torch.optim.Optimizer):
            raise ProtocolError(f"torch.optim has no optimizer {self.kind[:NAME_CHARACTERS_MAX]!r}")
        fused = {"fused": True} if self.kind in _FUSED and parameters else {}
        try:
            return known([{"params": list(parameters), **settled(self.settings), **fused}])  # type: ignore[call-arg]
        except (TypeError, ValueError, RuntimeError) as error:
            raise ProtocolError(f"torch.optim.{self.kind} does not take the settings of the run: {error}") from error


@dataclass(frozen=True)
class Recipe:
    """All groups, and which of them each parameter is in."""

    groups: tuple[GroupRecipe, ...]
    of_parameter: tuple[int, ...]


def recipe_of(optimizers: Optimizers, parameters: Sequence[torch.nn.Parameter]) -> Recipe:
    """ConfigError, with what to do, for optimizers that servers cannot run."""
    numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
    groups: list[GroupRecipe] = []
    places: dict[int, int] = {}
    for name, optimizer in by_name(optimizers).items():
        kind = type(optimizer).__name__
        if getattr(torch.optim, kind, None) is not type(optimizer):
            raise ConfigError(
                f"the {described(name)} is a {kind}, which is not one of torch.optim's",
                hint="parameter servers build the optimizer by its name: use one of torch.optim, or another mode",
            )
        for group in optimizer.param_groups:
            recipe = GroupRecipe(kind, settings_of(group, f"the {described(name)}'s"))
            check_can_be_cut(recipe)
            places |= {numbers[id(parameter)]: len(groups) for parameter in group["params"] if id(parameter) in numbers}
            groups.append(recipe)
    left_out = [number for number in range(len(parameters)) if number not in places]
    if left_out:
        raise ConfigError(
            f"{len(left_out)} of {len(parameters)} trained parameters are in no group of an optimizer",
            hint="give every parameter to an optimizer, or freeze it with requires_grad_(False)",
        )
    return Recipe(tuple(groups), tuple(places[number] for number in range(len(parameters))))


def settings_of(group: Mapping[str, Any], whose: str = "a group's", *, keep_notes: bool = False) -> dict[str, Plain]:
    """The plain values of a parameter group: what decides the update. `keep_notes`: and what schedulers note there."""
    found: dict[str, Plain] = {}
    for name, value in group.items():
        if name in _OURS or (name.startswith("initial_") and not keep_notes):  # a scheduler's own note
            continue
        plain = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        plain = list(plain) if isinstance(plain, tuple) else plain
        if not _is_plain(plain):
            raise ConfigError(
                f"{whose} setting {name} is a {type(value).__name__}, which cannot be sent to a parameter server",
                hint="servers take numbers, true and false, nothing, and tuples of numbers",
            )
        found[name] = plain
    return found


def _is_plain(value: Any) -> bool:
    if type(value) is list:
        return all(type(item) in (int, float) for item in value)
    return type(value) in (bool, int, float, type(None))


def settled(settings: Settings) -> dict[str, Any]:
    """As torch takes them. ProtocolError for what no worker would send."""
    if len(settings) > SETTINGS_MAX or not all(_is_plain(value) for value in settings.values()):
        raise ProtocolError("an optimizer's settings that are not plain values")
    if not all(name.isidentifier() and name not in _OURS for name in settings):
        raise ProtocolError("an optimizer's settings with names that no optimizer has")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}


def check_can_be_cut(recipe: GroupRecipe) -> None:
    """ConfigError if it gives something else on two halves of a matrix than on the whole one."""
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(6, 16, generator=generator)
    gradients = [torch.randn(6, 16, generator=generator) for _ in range(3)]
    try:
        whole = _trained(recipe, [start], [[gradient] for gradient in gradients])
        halves = _trained(recipe, _halves(start), [_halves(gradient) for gradient in gradients])
        same = torch.allclose(whole, halves, rtol=1e-5, atol=1e-6)
        why = "treats a matrix as a whole"
    except (ProtocolError, RuntimeError, TypeError, ValueError) as error:
        same, why = False, f"cannot be stepped on a part of a matrix: {str(error).splitlines()[0]}"
    if not same:
        raise ConfigError(
            f"torch.optim.{recipe.kind} {why}, and parameter servers cut matrices into slices",
            hint="use an optimizer that treats every element by itself (SGD, Adam, AdamW, Adagrad …), or another mode",
        )


def _halves(matrix: torch.Tensor) -> list[torch.Tensor]:
    return [matrix.flatten()[:48], matrix.flatten()[48:]]


def _trained(
    recipe: GroupRecipe, starts: Sequence[torch.Tensor], steps: Sequence[Sequence[torch.Tensor]]
) -> torch.Tensor:
    parameters = [torch.nn.Parameter(start.clone()) for start in starts]
    optimizer = recipe.build(parameters)
    for gradients in steps:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return torch.cat([parameter.detach().flatten() for parameter in parameters])
