"""A checkpoint that groups of two ranks have saved: the same bits right after loading, in whatever it is loaded by."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch.distributed import checkpoint as dcp

from holdfast.cli.main import main
from holdfast.testing.observed_run import ObservedRun

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]
SCRIPT = str(Path(__file__).with_name("sharded.py"))
STEPS = 2
State = dict[str, torch.Tensor]


def ended_with(home: Path, ranks: int, *words: str, resumed: bool = True) -> State:
    """What a run of one group has at step 2: where it begins with a checkpoint of that step, what it has loaded."""
    home.mkdir()
    to = home / "whole.safetensors"
    options = ["--workers", "1", "--ranks", str(ranks), "--checkpoint", str(home.parent / "saved"), "--save-every", "1"]
    run = ObservedRun(home, "r", options, [SCRIPT, str(STEPS), "AdamW", "--whole", str(to), *words])
    run.start()
    try:
        run.wait(run.over, "the end of the run", 90)
    finally:
        run.end()
    assert run.agent is not None and run.agent.returncode == 0, run.log()
    assert [event["step"] for event in run.seen if event["kind"] == "resumed"] == [STEPS] * resumed
    return safetensors.torch.load_file(to)


def assert_same(found: State, right: State) -> None:
    assert found.keys() == right.keys()
    for name, tensor in right.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape, name
        assert torch.equal(found[name].view(-1).view(torch.uint8), tensor.view(-1).view(torch.uint8)), name


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State]:
    """By a group of two, and what it had then, which torch has put together."""
    home = tmp_path_factory.mktemp("checkpoints")
    state = ended_with(home / "two", 2, resumed=False)
    assert state["hidden.0.weight"].shape == (57, 57) and "hidden.0.weight exp_avg_sq" in state
    return home, state


@pytest.mark.parametrize(("ranks", "words"), [(1, []), (4, []), (1, ["--plain"])], ids=["one", "four", "not sharded"])
def test_it_is_loaded_with_the_bits_that_were_saved(saved: tuple[Path, State], ranks: int, words: list[str]) -> None:
    home, right = saved
    assert_same(ended_with(home / f"{ranks}{''.join(words)}", ranks, *words), right)


@pytest.mark.parametrize("kind", ["safetensors", "dcp"])
def test_it_is_exported_as_whole_tensors_bit_for_bit(saved: tuple[Path, State], tmp_path: Path, kind: str) -> None:
    home, state = saved
    right = {name: tensor for name, tensor in state.items() if " " not in name}
    to = tmp_path / "exported"
    words = ["--step", str(STEPS), "--only", "parameters", "--as", kind, "--to", str(to)]
    assert main(["checkpoint", "export", str(home / "saved"), *words]) == 0
    if kind == "safetensors":
        found = safetensors.torch.load_file(to)
    else:
        found = {name: torch.full_like(tensor, -1) for name, tensor in right.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about loading without a process group
            dcp.load(found, checkpoint_id=str(to), no_dist=True)
    assert_same(found, right)
