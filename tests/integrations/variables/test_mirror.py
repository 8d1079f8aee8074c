"""A framework's variables and their mirror, with torch as the framework: no Keras is needed to see what is copied."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from holdfast.core.errors import ConfigError
from holdfast.integrations.variables.mirror import OPTIMIZER, Mirror, Variables, VariableState
from holdfast.integrations.variables.on_torch import OnTorch
from holdfast.state.snapshot import Holder


class Variable:
    """As Keras on torch has them."""

    def __init__(self, path: str, values: list[float], *, trainable: bool = True, dtype: Any = torch.float32) -> None:
        self.path = path
        self.name = path.rpartition("/")[2]
        self.value = torch.nn.Parameter(torch.tensor(values, dtype=dtype), requires_grad=trainable)


class Optimizer:
    def __init__(self, *variables: Variable) -> None:
        self.variables = list(variables)


class Apart(OnTorch):
    """The same, with memory of its own: every copy must be made."""

    shares = False

    def tensor(self, value: Any) -> torch.Tensor:
        return super().tensor(value).detach().clone()

    def write(self, variable: Any, tensor: torch.Tensor) -> None:
        with torch.no_grad():
            variable.value.copy_(tensor)

    def value(self, tensor: torch.Tensor) -> Any:
        return tensor.detach().clone()


def mirror(framework: OnTorch, shards: int = 4) -> Mirror:
    variables = Variables(
        trainable=[Variable("dense/kernel", [1.0, 2.0])],
        frozen=[Variable("dense/kernel", [5.0])],
        others=[Variable("norm/mean", [0.5], trainable=False)],
        metrics=[Variable("loss/total", [0.0], trainable=False)],
        generators=[Variable("seed_generator_state", [0, 0], trainable=False, dtype=torch.float64)],
        optimizer=Optimizer(Variable("adam/iteration", [7.0], trainable=False)),
    )
    return Mirror(framework, variables, shards=shards, seed=1)


@pytest.fixture(params=[OnTorch, Apart])
def framework(request: pytest.FixtureRequest) -> OnTorch:
    made: OnTorch = request.param()
    return made


def test_names_are_those_of_the_variables_and_each_is_there_once(framework: OnTorch) -> None:
    assert list(mirror(framework).module.state_dict()) == ["dense/kernel", "dense/kernel~2", "norm/mean", "loss/total"]


def test_a_metric_is_the_sum_over_all_shards(framework: OnTorch) -> None:
    """Every shard begins with nothing; the engine makes the mean of what they leave, and that is the sum."""
    one = mirror(framework)
    (total,) = one.variables.metrics
    buffer = dict(one.module.named_buffers())["loss/total"]
    buffer.fill_(10.0)  # of the steps before
    left = []
    for shard in range(4):
        with torch.no_grad():
            buffer.fill_(10.0)
        one.begin_shard((0, shard))
        assert float(total.value.detach()) == 0.0
        with torch.no_grad():
            total.value.add_(shard + 1.0)
        one.end_shard()
        left.append(float(buffer))
    assert sum(left) / 4 == 10.0 + 1 + 2 + 3 + 4


def test_what_a_shard_makes_of_a_variable_goes_and_the_mean_comes(framework: OnTorch) -> None:
    one = mirror(framework)
    (mean,) = one.variables.others
    buffer = dict(one.module.named_buffers())["norm/mean"]
    one.begin_shard((0, 0))
    with torch.no_grad():
        mean.value.fill_(3.0)
    one.end_shard()
    assert float(buffer) == 3.0
    with torch.no_grad():
        buffer.fill_(2.0)  # the engine's mean
    one.reduced(0)
    assert float(mean.value.detach()) == 2.0


def test_generators_follow_from_the_place_alone(framework: OnTorch) -> None:
    one, other = mirror(framework), mirror(framework)
    states = []
    for made, shards in ((one, (0, 1)), (other, (1, 0))):
        seen = {}
        for shard in shards:
            made.begin_shard((3, shard))
            seen[shard] = made.variables.generators[0].value.tolist()
        states.append(seen)
    assert states[0] == states[1]
    assert states[0][0] != states[0][1]


def test_gradients_are_the_engines_own_memory() -> None:
    one = mirror(Apart())
    given = torch.tensor([0.25, -1.0])
    one.contribute([given])
    (parameter,) = one.trained
    assert parameter.grad is not None and parameter.grad.tolist() == [0.25, -1.0]
    given.fill_(9.0)
    assert parameter.grad.tolist() == [0.25, -1.0]
    with pytest.raises(ConfigError, match="2 gradients were given for 1 trainable variables"):
        one.contribute([given, given])


def test_a_snapshot_brings_variables_and_optimizer_back(framework: OnTorch) -> None:
    first, second = mirror(framework), mirror(framework)
    for made, value in ((first, 8.0), (second, 0.0)):
        with torch.no_grad():
            for one in (*made.variables.trainable, *made.variables.others, *made.variables.optimizer.variables):
                one.value.fill_(value)
        made.take_all()
    holders = [Holder(made.module, made.optimizer, made.extras) for made in (first, second)]
    snapshot = holders[0].capture(5).copied()
    holders[1].restore(snapshot)
    restored = second.variables
    for one in (*restored.trainable, *restored.others, *restored.optimizer.variables):
        assert set(one.value.detach().tolist()) == {8.0}
    assert holders[1].capture(5).digest() == snapshot.digest()


def test_the_state_of_another_optimizer_is_refused() -> None:
    sent = mirror(Apart()).extras[OPTIMIZER].state_dict()
    other = VariableState(Apart(), [Variable("sgd/iteration", [0.0])], "SGD")
    with pytest.raises(ValueError, match="the run's optimizer is Optimizer, and this worker's is SGD"):
        other.load_state_dict(sent)


def test_a_flipped_bit_of_the_mirror_reaches_the_variable() -> None:
    """As a drill does it: a mirror that healed itself would hide what the audits are to find."""
    one = mirror(Apart())
    one.take_all()
    (parameter,) = one.trained
    parameter.detach().view(torch.int32)[0] ^= 1 << 20
    one.begin_step(1)
    assert torch.equal(one.variables.trainable[0].value.detach(), parameter.detach())
