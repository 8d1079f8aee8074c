"""Several optimizers by name: through a checkpoint and its exported file, with other counts of workers, exactly.

That many workers, a death and a joiner change no bit is checked with the cases "two optimizers" of the other files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import reference
import torch
from cases import CASES, dataset, gan, mlp, sgd

import holdfast
from holdfast import checkpoint
from holdfast.cli.main import main
from holdfast.core.errors import ConfigError
from holdfast.state.snapshot import Holder
from tests.harness.forked import agreed, forked

Join = Callable[..., holdfast.Run]
BATCH, SHARDS = 24, 6


def train(steps: int, place: Path, name: str = "two optimizers in turn", join: Join = holdfast.join) -> Any:
    case = CASES[name]
    training = case.start()
    run = join(
        training.model,
        training.optimizer,
        dataset(),
        batch_size=BATCH,
        shards=SHARDS,
        seed=reference.SEED,
        extras=training.extras,
        checkpoint=holdfast.Checkpoints(place, every=1000),
    )
    for step in run.steps(steps):
        for batch in step:
            case.shard(training, batch, step.number)
        case.apply(training, step.number)
    run.close()
    return reference.state_of(training)


@pytest.mark.processes
def test_each_optimizer_goes_through_a_checkpoint_and_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two workers save; what they saved is exported and imported, and three workers and then one go on from there."""
    case = replace(CASES["two optimizers in turn"], steps=9)
    expected, _ = reference.train(case, shards=SHARDS, batch=BATCH)
    place, file = tmp_path / "place", tmp_path / "state.safetensors"
    agreed(forked(lambda: train(4, place), workers=2))
    saved = checkpoint.load(str(place), step=4)
    assert set(saved["optimizer"]) == {"g", "d"}
    assert [saved["optimizer"][name]["kind"] for name in "gd"] == ["Adam", "SGD"]
    assert main(["checkpoint", "export", str(place), "--step", "4", "--to", str(file)]) == 0
    for workers in (3, 1):
        other = tmp_path / f"for {workers}"
        assert main(["checkpoint", "import", str(other), "--from", str(file), "--step", "4"]) == 0
        assert agreed(forked(lambda place=other: train(9, place), workers=workers)) == reference.state_of(expected)
    assert main(["checkpoint", "show", str(place), "--json"]) == 0
    assert "optimizer/g/packed/state/0/exp_avg" in capsys.readouterr().out


def test_two_models_by_name_are_one_module(joined: Join) -> None:
    torch.manual_seed(5)
    training = gan()
    run = joined(dict(training.model.items()), training.optimizer, dataset(), batch_size=8, shards=4)
    assert [name for name, _ in run.model.named_parameters()] == [n for n, _ in training.model.named_parameters()]
    assert run.optimizer == training.optimizer


@pytest.mark.parametrize(
    ("optimizers", "sentence"),
    [
        (lambda m: {"g": torch.optim.SGD(m.parameters(), lr=0.1)}, "the run has the optimizers 'd', 'g', and this"),
        (lambda m: torch.optim.SGD(m.parameters(), lr=0.1), "and this worker has one optimizer without a name"),
        (lambda m: {n: torch.optim.SGD(m[n].parameters(), lr=0.1) for n in "gd"}, "the run's optimizer 'g' is a Adam"),
    ],
)
def test_a_snapshot_of_other_optimizers_is_not_taken(optimizers: Any, sentence: str) -> None:
    training, twin = gan(), gan()
    snapshot = Holder(training.model, training.optimizer).capture(0)
    with pytest.raises(ConfigError) as caught:
        Holder(twin.model, optimizers(twin.model)).restore(snapshot)
    assert sentence in caught.value.message


def test_a_parameter_in_no_optimizer_or_in_two_is_told(joined: Join) -> None:
    training = gan()
    g, d = training.model["g"], training.model["d"]
    only_g = torch.optim.SGD(g.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=r"4 parameters of the model are in no optimizer.*: d.0.weight, d.0.bias, "):
        joined(training.model, only_g, dataset(), batch_size=8, shards=4)
    d.requires_grad_(False)
    joined(training.model, only_g, dataset(), batch_size=8, shards=4)
    shared = {"g": only_g, "all": torch.optim.SGD(training.model.parameters(), lr=0.1)}
    with pytest.warns(UserWarning, match=r"6 parameters .* in two optimizers, 'g' and 'all'.*g.0.weight"):
        joined(training.model, shared, dataset(), batch_size=8, shards=4)


def test_every_optimizer_is_refused_inside_the_inner_loop(joined: Join) -> None:
    for name in "gd":
        training = gan()
        run = joined(training.model, training.optimizer, dataset(), batch_size=8, shards=4)
        with pytest.raises(ConfigError, match=r"was called inside the loop"):
            for step in run.steps(1):
                for _batch in step:
                    training.optimizer[name].step()


def test_one_optimizer_keeps_its_format(joined: Join, tmp_path: Path) -> None:
    training = sgd(mlp())
    run = joined(training.model, training.optimizer, dataset(), batch_size=8, shards=4, checkpoint=str(tmp_path))
    for step in run.steps(1):
        for x, _ in step:
            training.model(x).sum().backward()
        training.optimizer.step()
    run.close()
    assert set(checkpoint.load(str(tmp_path))["optimizer"]) == {"kind", "packed", "names"}
