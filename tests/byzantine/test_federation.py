"""Simulated federated learning: rules and attacks on real images, the file that is gone on with, and the command."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from holdfast.byzantine.federation.choices import Choices
from holdfast.byzantine.federation.clients import Network
from holdfast.byzantine.federation.data import dealt, load
from holdfast.byzantine.federation.rounds import Settings, train
from holdfast.cli.main import main
from holdfast.core.errors import ConfigError

SHORT = Settings(rounds=40)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def test_gradients_are_those_of_autograd() -> None:
    network = Network(9, 5, 3)
    weights = torch.stack([network.initial(seed) for seed in range(4)]).double().requires_grad_()
    x, y = torch.randn(4, 6, 9, dtype=torch.float64), torch.randint(3, (4, 6))
    first, second = weights[:, :45].view(4, 9, 5), weights[:, 50:65].view(4, 5, 3)
    logits = torch.relu(x @ first + weights[:, None, 45:50]) @ second + weights[:, None, 65:]
    torch.nn.functional.cross_entropy(logits.reshape(-1, 3), y.reshape(-1), reduction="sum").backward()
    assert weights.grad is not None
    found = network.gradients(weights.detach().float(), x.float(), y).double()
    assert torch.allclose(found, weights.grad / 6, atol=1e-5)


def test_every_sample_is_dealt_once_and_skew_is_skew() -> None:
    labels = load("digits").y
    alike, skewed = (dealt(labels, 20, dirichlet=spread, seed=3) for spread in (None, 0.1))
    for parts in (alike, skewed):
        assert torch.equal(torch.cat(parts).sort().values, torch.arange(len(labels)))
        assert min(map(len, parts)) >= 4

    def kinds(parts: list[torch.Tensor]) -> float:
        return sum(len(labels[part].unique()) for part in parts) / len(parts)

    assert kinds(alike) > 9 and kinds(skewed) < 6
    assert all(torch.equal(a, b) for a, b in zip(skewed, dealt(labels, 20, dirichlet=0.1, seed=3), strict=True))


def test_a_robust_rule_stands_where_the_mean_falls() -> None:
    images = load("digits")

    def accuracy(aggregator: str, attack: str) -> float:
        return train(images, SHORT, aggregator=aggregator, attack=attack, seed=0).accuracy

    free = accuracy("mean", "none")
    assert free > 0.8
    for attack in ("sign-flip", "nan", "label-flip", "alie*"):
        assert accuracy("nnm+trimmed-mean", attack) > free - 0.05, attack
    assert accuracy("mean", "sign-flip") < 0.5


def test_hostile_clients_are_told_from_honest_ones() -> None:
    found = train(load("digits"), SHORT, aggregator="nnm+trimmed-mean", attack="sign-flip", seed=1)
    assert max(found.trusted[16:]) < 0.1 and min(found.trusted[:16]) > 0.5
    assert len(found.accuracies) == SHORT.rounds


def test_a_backdoor_is_measured_too() -> None:
    found = train(load("digits"), SHORT, aggregator="mean", attack="backdoor", seed=1)
    assert found.backdoor is not None and 0.0 <= found.backdoor <= 1.0


def test_what_is_there_is_gone_on_with(tmp_path: Path) -> None:
    images, keep = load("digits"), tmp_path / "found.json"

    def choices(rounds: int = 3) -> Choices:
        return Choices(Settings(rounds=rounds), "digits", ["mean", "median"], ["none", "nan"], [0, 1]).validate()

    first = choices()
    for _, done, total in first.compute(images, keep=keep):
        assert total == 8
        if done == 3:
            break
    again = choices()
    again.read(keep)
    assert 0 < len(again.found) < 8 and not again.is_done
    assert [done for _, done, _ in again.compute(images, keep=keep)] == list(range(len(first.found) + 1, 9))
    whole = choices()
    list(whole.compute(images))
    assert whole.found == again.found
    with pytest.raises(ConfigError, match="other settings"):
        choices(rounds=4).read(keep)
    keep.write_text("{")
    with pytest.raises(ConfigError, match="is not holdfast federate's"):
        choices().read(keep)


def test_files_of_mnists_format_are_read_gzipped_or_not(tmp_path: Path) -> None:
    draws = np.random.default_rng(0)
    for stem, shape in (("train", 40), ("t10k", 12)):
        pixels = draws.integers(0, 256, (shape, 7, 7), dtype=np.uint8)
        labels = (np.arange(shape) % 10).astype(np.uint8)
        images = bytes([0, 0, 8, 3]) + b"".join(one.to_bytes(4, "big") for one in pixels.shape) + pixels.tobytes()
        named = bytes([0, 0, 8, 1]) + shape.to_bytes(4, "big") + labels.tobytes()
        with gzip.open(tmp_path / f"{stem}-images-idx3-ubyte.gz", "wb") as file:
            file.write(images)
        (tmp_path / f"{stem}-labels-idx1-ubyte").write_bytes(named)
    found = load(str(tmp_path))
    assert found.x.shape == (40, 49) and found.side == 7 and found.classes == 10 and float(found.x.max()) <= 1.0
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(b"\0\0")
    with pytest.raises(ConfigError, match="MNIST's format"):
        load(str(tmp_path))


def test_the_command_prints_a_table_draws_and_keeps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept, drawn = tmp_path / "f.json", tmp_path / "f.png"
    words = ["federate", "--rounds", "5", "--aggregator", "mean,median", "--attack", "none,alie", "--seed", "0,1"]
    assert main([*words, "--json", str(kept), "--plot", str(drawn)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["none", "alie"] and lines[2].split()[0] == "mean" and len(lines) == 4
    assert set(json.loads(kept.read_text())["accuracy"]) == {"mean", "median"}
    assert drawn.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--aggregator", "krumm"], "did you mean krum?"),
        (["--attack", "alei"], "did you mean alie?"),
        (["--byzantine", "20"], "cannot be hostile"),
        (["--byzantine", "9", "--aggregator", "krum"], "needs at least 21 updates"),
        (["--byzantine", "0", "--attack", "alie"], "nobody to attack"),
        (["--data", "cats"], "no images 'cats'"),
        (["--dirichlet", "-1"], "is no spread"),
        (["--seed", "x"], "not a whole number"),
        (["--rounds", "0"], "trains nothing"),
        (["--clients", "900", "--byzantine", "1"], "too few for 900 clients"),
    ],
)
def test_a_mistake_gets_one_sentence(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["federate", *words]) == 2
    printed = capsys.readouterr().err
    assert said in printed and "Traceback" not in printed


@pytest.mark.processes
def test_help_comes_without_torch() -> None:
    code = (
        "import sys; from holdfast.cli.main import main; main(['federate', '--help']); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60).returncode == 0
