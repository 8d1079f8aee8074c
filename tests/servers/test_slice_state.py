"""A slice on a server does to its elements what the optimizer in the script would have done to them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast.core.errors import ConfigError, ProtocolError
from holdfast.servers.recipe import GroupRecipe, check_can_be_cut, recipe_of, settings_of
from holdfast.servers.slice_state import SliceState, first_not_finite
from holdfast.servers.slicing import Size, cut

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.01, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01),
    "adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.01, centered=True),
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rprop": torch.optim.Rprop,
    "asgd": torch.optim.ASGD,
}


def model() -> torch.nn.Module:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 3))


def parameters_of(of: torch.nn.Module) -> list[torch.nn.Parameter]:
    return list(of.parameters())


class Servers:
    """All slices of a model, in this process."""

    def __init__(self, parameters: list[torch.nn.Parameter], optimizers: Any, slices: int) -> None:
        self.recipe = recipe_of(optimizers, parameters)
        self.slices = cut([Size(one.numel(), one.element_size()) for one in parameters], slices)
        self.states = [
            SliceState(
                [parameters[s.parameter].detach().flatten()[s.start : s.stop].clone() for s in one.segments],
                [self.recipe.of_parameter[s.parameter] for s in one.segments],
                self.recipe.groups,
            )
            for one in self.slices
        ]

    def push(self, gradients: list[torch.Tensor | None], settings: list[Any]) -> None:
        for one, state in zip(self.slices, self.states, strict=True):
            flat = [(gradients[s.parameter], s) for s in one.segments]
            state.apply([g.flatten()[s.start : s.stop] if g is not None else None for g, s in flat], settings)

    def pulled(self, parameters: list[torch.nn.Parameter]) -> list[torch.Tensor]:
        found = [torch.empty_like(one).flatten() for one in parameters]
        for one, state in zip(self.slices, self.states, strict=True):
            for segment, value in zip(one.segments, state.values, strict=True):
                found[segment.parameter][segment.start : segment.stop] = value
        return [value.view_as(one) for value, one in zip(found, parameters, strict=True)]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("slices", [1, 3])
def test_slices_follow_the_optimizer_and_its_schedule(name: str, slices: int) -> None:
    parameters = parameters_of(model())
    optimizer = OPTIMIZERS[name](parameters)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    servers = Servers(parameters, optimizer, slices)
    for step in range(6):
        torch.manual_seed(step)
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        gradients: list[torch.Tensor | None] = [one.grad.clone() for one in parameters if one.grad is not None]
        servers.push(gradients, [settings_of(group) for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    for mine, theirs in zip(parameters, servers.pulled(parameters), strict=True):
        torch.testing.assert_close(theirs, mine.detach(), rtol=1e-5, atol=1e-6)


def test_several_optimizers_and_groups_keep_their_settings() -> None:
    parameters = parameters_of(model())
    groups = [{"params": parameters[:1], "lr": 0.5}, {"params": parameters[1:2], "lr": 0.0}]
    optimizers = {"a": torch.optim.SGD(groups, lr=1.0), "b": torch.optim.Adam(parameters[2:])}
    recipe = recipe_of(optimizers, parameters)
    assert [group.kind for group in recipe.groups] == ["SGD", "SGD", "Adam"] and recipe.of_parameter == (0, 1, 2, 2)
    servers = Servers(parameters, optimizers, 2)
    before = [one.detach().clone() for one in parameters]
    settings = [settings_of(group) for one in optimizers.values() for group in one.param_groups]
    servers.push([torch.ones_like(one) for one in parameters], settings)
    after = servers.pulled(parameters)
    assert torch.equal(after[0], before[0] - 0.5) and torch.equal(after[1], before[1])
    assert not torch.equal(after[2], before[2])


def test_a_parameter_without_a_gradient_stays() -> None:
    parameters = parameters_of(model())
    servers = Servers(parameters, OPTIMIZERS["adamw"](parameters), 2)
    before = [one.detach().clone() for one in parameters]
    settings = [settings_of(torch.optim.AdamW(parameters).param_groups[0])]
    servers.push([None, *(torch.ones_like(one) for one in parameters[1:])], settings)
    after = servers.pulled(parameters)
    assert torch.equal(after[0], before[0]) and not torch.equal(after[3], before[3])


@pytest.mark.parametrize("name", ["sgd", "adam", "nadam"])
def test_a_replica_that_is_given_the_state_goes_on_with_the_same_bits(name: str) -> None:
    parameters = parameters_of(model())
    optimizer = OPTIMIZERS[name](parameters)
    servers, late = Servers(parameters, optimizer, 2), Servers(parameters, optimizer, 2)
    settings = [settings_of(group) for group in optimizer.param_groups]

    def push(to: Servers, seed: int) -> None:
        torch.manual_seed(seed)
        to.push([torch.randn_like(one) for one in parameters], settings)

    push(servers, 1)
    push(servers, 2)
    for state, twin in zip(servers.states, late.states, strict=True):
        assert state.digest() != twin.digest()
        twin.restore(state.capture())
        assert state.digest() == twin.digest() and twin.updates == 2
    push(servers, 3)
    assert servers.states[0].digest() != late.states[0].digest(), "the state was copied"
    push(late, 3)
    assert [one.digest() for one in servers.states] == [one.digest() for one in late.states]


def test_what_does_not_fit_changes_nothing() -> None:
    state = SliceState([torch.zeros(8)], [0], [GroupRecipe("SGD", {"lr": 1.0})])
    before, fits = state.digest(), [{"lr": 1.0}]
    wrong: list[tuple[Any, Any]] = [
        ([], fits),
        ([torch.zeros(7)], fits),
        ([torch.zeros(8, dtype=torch.float64)], fits),
        ([torch.ones(8)], []),
        ([torch.ones(8)], [{"lr": "fast"}]),
        ([torch.ones(8)], [{"params": 1}]),
        ([torch.ones(8)], [{"speed": 1.0}]),
    ]
    for gradients, settings in wrong:
        with pytest.raises(ProtocolError):
            state.apply(gradients, settings)
    for captured in (None, {}, {"updates": 1, "values": [torch.zeros(9)], "optimizers": {}}):
        with pytest.raises(ProtocolError):
            state.restore(captured)
    assert state.digest() == before and state.updates == 0


@pytest.mark.parametrize("kind", ["LBFGS", "Muon", "Adafactor"])
def test_an_optimizer_that_cannot_be_cut_is_refused_by_name(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"torch.optim.{kind} .*parameter servers cut matrices"):
        check_can_be_cut(GroupRecipe(kind, {"lr": 0.01}))


def test_an_optimizer_of_ones_own_is_refused_by_name() -> None:
    class Mine(torch.optim.SGD):
        pass

    parameters = parameters_of(model())
    with pytest.raises(ConfigError, match=r"a Mine, which is not one of torch\.optim's"):
        recipe_of(Mine(parameters, 0.1), parameters)
    with pytest.raises(ConfigError, match="2 of 4 trained parameters are in no group"):
        recipe_of(torch.optim.SGD(parameters[:2], 0.1), parameters)


@pytest.mark.parametrize("kind", ["Optimizer", "lr_scheduler", "os", "x" * 1000])
def test_a_name_from_the_wire_is_only_looked_up(kind: str) -> None:
    with pytest.raises(ProtocolError):
        GroupRecipe(kind, {"lr": 0.1}).build([torch.nn.Parameter(torch.zeros(2))])


def test_numbers_that_are_not_finite_are_found() -> None:
    good, bad = torch.zeros(200_000), torch.zeros(200_000)
    bad[150_001] = float("nan")
    assert first_not_finite([good, None, good]) is None
    assert first_not_finite([good, None, bad]) == 2
    assert first_not_finite([torch.full((3,), 3e38)]) is None, "large is not infinite"
