"""`holdfast federate --buckets`: the same training without anybody seeing an update, and what noise costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from holdfast.byzantine.federation.by_buckets import BucketChoice
from holdfast.byzantine.federation.combining import Cohort
from holdfast.byzantine.federation.data import load
from holdfast.byzantine.federation.rounds import Settings, train
from holdfast.byzantine.privacy.noise import Noise
from holdfast.cli.main import main

FEW = Settings(clients=8, byzantine=1, rounds=6)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def cohort(clients: int = 8, f: int = 0, aggregator: str = "mean", numbers: int = 50) -> Cohort:
    return Cohort(
        aggregator=aggregator, attack="none", seed=1, clients=clients, f=f, lr=0.5, model=torch.zeros(numbers)
    )


def test_the_mean_of_buckets_of_one_size_is_the_mean() -> None:
    sent = torch.randn(8, 50, generator=torch.Generator().manual_seed(0))
    with BucketChoice(buckets=4).combining()(cohort()) as combiner:
        for _ in range(2):
            found = combiner.combine(torch.zeros(50), sent)
            assert torch.allclose(found.model, -0.5 * sent.mean(dim=0), atol=1e-6)
    assert found.trusted == (True,) * 8


def test_hostile_clients_are_borne_and_their_buckets_not_trusted() -> None:
    sent = torch.ones(8, 50)
    sent[7] = float("nan")
    with BucketChoice(buckets=4).combining()(cohort(f=1, aggregator="trimmed-mean")) as combiner:
        found = combiner.combine(torch.zeros(50), sent)
    assert torch.allclose(found.model, torch.full((50,), -0.5), atol=1e-6)
    assert not found.trusted[7] and sum(found.trusted) == 6  # whoever is in its bucket is not, either


def test_a_training_in_buckets_learns_what_one_in_the_open_does() -> None:
    images = load("digits")

    def accuracy(attack: str, **more: object) -> float:
        settings = Settings(clients=8, byzantine=1, rounds=30)
        return train(images, settings, aggregator="trimmed-mean", attack=attack, seed=0, **more).accuracy  # type: ignore[arg-type]

    masked = accuracy("sign-flip", combining=BucketChoice(buckets=4).combining())
    assert masked > accuracy("none") - 0.05


def test_noise_is_as_much_as_is_said_and_no_bucket_is_without() -> None:
    """Zeros from all: what is left of the mean is noise, of `multiplier * clip` or more in each bucket's sum."""
    choice = BucketChoice(buckets=2, noise=Noise(multiplier=2.0, clip=0.5))
    with choice.combining()(cohort(numbers=4000)) as combiner:
        found = combiner.combine(torch.zeros(4000), torch.zeros(8, 4000))
    # Two sums of 4 with 4/3 of the variance that is owed, means of 4, mean of two, times the learning rate.
    expected = 2.0 * 0.5 * (4 / 3) ** 0.5 / 4 / 2**0.5 * 0.5
    assert float(found.model.std()) == pytest.approx(expected, rel=0.06)


def test_without_the_hostile_clients_there_may_be_fewer_buckets() -> None:
    """`none` trains with the honest ones alone: 7 of 8, which are too few for four buckets of two."""
    found = train(
        load("digits"), FEW, aggregator="mean", attack="none", seed=0, combining=BucketChoice(buckets=4).combining()
    )
    assert len(found.accuracies) == 6 and found.trusted == (1.0,) * 7


def test_the_command_prints_what_every_round_has_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = tmp_path / "f.json"
    words = ["--clients", "8", "--byzantine", "1", "--rounds", "3", "--aggregator", "trimmed-mean", "--attack", "alie"]
    private = ["--buckets", "4", "--clip", "1", "--noise", "4", "--delta", "1e-6"]
    assert main(["federate", *words, *private, "--json", str(kept)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "4 masked buckets, clip 1, noise 4" in lines[0] and "at delta 1e-06" in lines[3]
    assert lines[4].split() == ["round", "1", "2", "3"]
    spent = json.loads(kept.read_text())["epsilon"]
    assert lines[5].split() == ["epsilon", *(f"{one:.3g}" for one in spent)] and spent == sorted(spent)
    assert main(["federate", *words, *private[:-4], "--json", str(kept)]) == 2  # of another way


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--buckets", "8"], "needs 9 buckets: there are 8"),
        (["--buckets", "11"], "cannot be dealt into 11 buckets"),
        (["--buckets", "0"], "0 buckets"),
        (["--buckets", "10", "--colluding", "1"], "buckets of at least 3"),
        (["--noise", "1"], "--noise 1 is about buckets, and there are none"),
        (["--clip", "1"], "--clip 1 is about buckets"),
        (["--buckets", "10", "--noise", "1"], "add --clip 1"),
        (["--buckets", "10", "--clip", "0"], "is no length"),
        (["--buckets", "10", "--clip", "1", "--noise", "-1"], "is no noise"),
        (["--buckets", "10", "--clip", "1", "--noise", "1", "--delta", "2"], "is no probability"),
        (["--buckets", "10", "--clip", "1", "--delta", "1e-5"], "there is none"),
        (["--buckets", "10", "--servers", "4"], "leave one out"),
        (["--dashboard", "70000"], "70000 is not a port"),
    ],
)
def test_a_mistake_gets_one_sentence(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["federate", "--rounds", "1", *words]) == 2
    printed = capsys.readouterr().err
    assert said in printed and "Traceback" not in printed
