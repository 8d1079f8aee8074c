"""The forms of updates, what is not finite in them, how much memory they take, and arguments that make no sense."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.byzantine import (
    Blocks,
    Bulyan,
    CenteredClipping,
    Krum,
    Mean,
    Median,
    TrimmedMean,
    WorkerMomentum,
    mapped,
    parse,
)
from holdfast.core.errors import ConfigError, TooFewUpdates

WORDS = [
    "mean",
    "median",
    "trimmed-mean",
    "meamed",
    "geometric-median",
    "krum",
    "multi-krum",
    "bulyan",
    "centered-clipping",
    "mda",
    "caf",
    "nnm+trimmed-mean",
    "bucketing:2+geometric-median",
    "arc+nnm+median",
    "clip:5+krum",
    "distinct+centered-clipping",
]


def updates(n: int = 11, d: int = 20_000, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


def cut(x: torch.Tensor, widths: list[int]) -> Callable[[], Iterator[torch.Tensor]]:
    def read() -> Iterator[torch.Tensor]:
        start = 0
        for number in range(10**9):
            if start >= x.shape[1]:
                return
            stop = start + widths[number % len(widths)]
            yield x[:, start:stop].clone()
            start = stop

    return read


@pytest.mark.parametrize("word", WORDS)
def test_a_stream_a_list_and_files_give_the_bits_of_a_stack(word: str, tmp_path: Path) -> None:
    x, rule = updates(), parse(word)
    expected = rule.aggregate(x, 2)
    for number, row in enumerate(x):
        (tmp_path / str(number)).write_bytes(row.numpy().tobytes())
    others: list[Any] = [
        Blocks(11, 20_000, cut(x, [1, 777, 8192, 3])),
        Blocks(11, 20_000, cut(x, [20_000])),
        list(x),
        mapped([tmp_path / str(number) for number in range(11)], 20_000),
        x.t().contiguous().t(),  # columns are not next to each other
    ]
    for other in others:
        found = rule.aggregate(other, 2)
        assert torch.equal(found.value, expected.value)
        assert found.trusted == expected.trusted and found.scores == expected.scores


@pytest.mark.parametrize("word", WORDS)
def test_state_dicts_are_the_same_update_in_parts(word: str) -> None:
    x, rule = updates(d=9001), parse(word)
    states = [{"a": row[:4000].view(40, 100), "b": row[4000:9000].view(5, 10, 100), "c": row[9000]} for row in x]
    found, expected = rule.aggregate(states, 2), rule.aggregate(x, 2)
    assert list(found.value) == ["a", "b", "c"] and found.value["a"].shape == (40, 100) and found.value["c"].shape == ()
    assert torch.equal(torch.cat([part.reshape(-1) for part in found.value.values()]), expected.value)
    assert found.trusted == expected.trusted


@pytest.mark.parametrize("word", ["mean", "trimmed-mean", "krum", "nnm+median", "centered-clipping"])
def test_every_dtype_keeps_its_own(word: str) -> None:
    x = updates(d=600).double()
    dtypes = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    states = [
        {
            **{str(dtype): row.to(dtype) for dtype in dtypes},
            "batches": torch.tensor(100 + number % 3),
            "bytes": torch.full((3,), number, dtype=torch.uint8),
            "flag": torch.tensor([True, number == 0]),
            "nothing": torch.empty(0),
        }
        for number, row in enumerate(x)
    ]
    value = parse(word).aggregate(states, 2).value
    assert {name: tensor.dtype for name, tensor in value.items()} == {
        name: tensor.dtype for name, tensor in states[0].items()
    }
    assert 100 <= value["batches"].item() <= 102 and value["flag"][0].item() and value["nothing"].numel() == 0
    reference = parse(word).aggregate(x, 2).value
    if word in ("mean", "trimmed-mean"):
        assert torch.equal(value["torch.float64"], reference) and not value["flag"][1]
        assert torch.allclose(value["torch.float16"].double(), reference, atol=5e-3)


def test_the_updates_are_left_as_they_were_and_out_is_used() -> None:
    for word in WORDS:
        x = updates(d=300).requires_grad_()
        before, out = x.detach().clone(), torch.full((300,), math.nan)
        found = parse(word).aggregate(x, 2, out=out)
        assert torch.equal(x.detach(), before) and found.value is out and bool(out.isfinite().all())
        assert torch.equal(out, parse(word).aggregate(x, 2).value)


@pytest.mark.parametrize("word", [*WORDS, "nnm+krum"])
@pytest.mark.parametrize("bomb", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_taken_out_and_may_have_been_honest(word: str, bomb: float) -> None:
    """The f may still be there: so the rest is combined with f, where it is enough for that."""
    x, rule = updates(n=13, d=1000), parse(word)
    x[4, 999], x[7, :] = bomb, bomb
    found = rule.aggregate(x, 2)
    kept = [number for number in range(13) if number not in (4, 7)]
    expected = rule.aggregate(x[kept], 2)
    assert torch.equal(found.value, expected.value)
    assert [found.trusted[number] for number in kept] == list(expected.trusted)
    assert not found.trusted[4] and found.scores[7] == math.inf


def test_numbers_beyond_float32_count_as_not_finite_in_float64_too() -> None:
    x = updates(n=5, d=10).double()
    x[2, 3] = 1e39
    found = TrimmedMean().aggregate(x, 1)
    assert torch.equal(found.value, TrimmedMean().aggregate(x[[0, 1, 3, 4]], 1).value)
    assert found.scores[2] == math.inf
    x[2, 3] = 1e38
    assert TrimmedMean().aggregate(x, 1).trusted[2]


def test_an_honest_update_that_runs_over_does_not_disarm_the_rule() -> None:
    x = updates(n=5, d=50)
    x[0] = 1e6  # the hostile one
    x[3, 7] = math.inf  # an honest one
    found = TrimmedMean().aggregate(x, 1)
    assert torch.equal(found.value, TrimmedMean().aggregate(x[[0, 1, 2, 4]], 1).value) and found.value.max() < 10.0


def test_where_the_rest_is_too_few_for_f_a_bomb_was_one_of_them() -> None:
    x = updates(n=7, d=50)
    x[0, 0], x[5, 3] = math.nan, math.nan
    assert torch.equal(TrimmedMean().aggregate(x, 3).value, TrimmedMean().aggregate(x[[1, 2, 3, 4, 6]], 2).value)
    assert Krum().bearing(7, 2, 0) == 2 and Krum().bearing(6, 2, 2) == 1 and Krum().bearing(3, 2, 1) == 1


def test_more_than_f_bombs_are_refused_however_many_are_left() -> None:
    x = updates(n=7, d=50)
    x[:3, 0] = math.nan
    for rule in (TrimmedMean(), Median(), Mean(), Krum(left_out=1)):
        with pytest.raises(TooFewUpdates, match=r"3 of 7 updates are not finite.* is told of 2, and 4 are left"):
            rule.aggregate(x, 2)
    with pytest.raises(TooFewUpdates, match=r"1 of 7 updates are not finite.* 4 none: krum needs 3 for f=0, and 2 are"):
        x[:2, 0] = 0.0
        Krum().aggregate(x, 1, [1.0, 1.0, -1.0, 0.0, 0.0, 0.0, 0.0])
    with pytest.raises(TooFewUpdates, match="mean is told of 1, and 0 are left"):
        Mean().aggregate(torch.full((3, 2), math.nan), 1)


ABSURD: list[tuple[Callable[[], Any], str]] = [
    (lambda: Krum().aggregate(updates(6, 5), 2), "krum with f=2 needs at least 7 updates, and there are 6"),
    (lambda: Bulyan().aggregate(updates(10, 5), 2), "bulyan with f=2 needs at least 11 updates"),
    (lambda: TrimmedMean().aggregate(updates(4, 5), 2), "trimmed-mean with f=2 needs at least 5 updates"),
    (lambda: parse("nnm+bulyan").aggregate(updates(6, 5), 1), r"nnm\+bulyan with f=1 needs at least 7"),
    (lambda: parse("bucketing:3+median").aggregate(updates(6, 5), 1), r"bucketing:3\+median with f=1 needs at least 7"),
    (lambda: Median().aggregate(updates(6, 5), -1), "f=-1 is not a number of updates"),
    (lambda: Median().aggregate(updates(6, 5), 0.2), "f=0.2 is not a number of updates"),  # type: ignore[arg-type]
    (lambda: Median().aggregate(updates(6, 5), True), "f=True is not a number of updates"),
    (lambda: Median().aggregate([], 0), "there are no updates"),
    (lambda: Median().aggregate(torch.zeros(5), 0), r"a stack of updates is \(n, ...\), not \(5,\)"),
    (lambda: Median().aggregate([torch.zeros(3), torch.zeros(4)], 0), "update 1 has .4,. of torch.float32"),
    (lambda: Median().aggregate([torch.zeros(3), torch.zeros(3).double()], 0), "update 1 has .3,. of torch.float64"),
    (lambda: Median().aggregate([{"a": torch.zeros(3)}, {"b": torch.zeros(3)}], 0), "update 1 has no 'a'"),
    (lambda: Median().aggregate([{}, {"b": torch.zeros(3)}], 0), "update 1 alone has 'b'"),
    (
        lambda: Median().aggregate([{"a": torch.zeros(3)}, {"a": torch.zeros(3, 1)}], 0),
        "update 1 has .3, 1. of torch.float32 in 'a'",
    ),
    (lambda: Median().aggregate([torch.zeros(3), {"a": torch.zeros(3)}], 0), "neither tensors nor state dicts"),  # type: ignore[list-item]
    (lambda: Median().aggregate(["a", "b"], 0), "neither tensors nor state dicts"),  # type: ignore[list-item]
    (lambda: Median().aggregate(torch.zeros(3, 3, dtype=torch.complex64), 0), "an update is of torch.complex64"),
    (
        lambda: Median().aggregate(Blocks(3, 5, lambda: [torch.zeros(3, 4)]), 0),
        "the blocks have 4 columns together, not 5",
    ),
    (lambda: Median().aggregate(Blocks(3, 4, lambda: [torch.zeros(2, 4)]), 0), "a block is .2, 4."),
    (lambda: Median().aggregate(updates(5, 5), 0, [1.0] * 4), "there are 4 weights for 5 updates"),
    (lambda: Median().aggregate(updates(5, 5), 0, [0.0] * 5), "no update has a weight above zero"),
    (lambda: Median().aggregate(updates(5, 5), 0, out=torch.zeros(4)), r"out is \(4,\)"),
    (lambda: Median().aggregate(updates(5, 5), 0, out={"a": torch.zeros(5)}), "out is not a tensor"),
    (
        lambda: CenteredClipping(start=torch.full((5,), math.nan)).aggregate(updates(5, 5), 1),
        "start from is not finite",
    ),
    (lambda: CenteredClipping(radius=0.0), "radius=0.0"),
    (lambda: CenteredClipping(start="mean"), "start='mean'"),
    (lambda: Krum(left_out=0), "left_out=0"),
    (lambda: WorkerMomentum(1.0), "beta=1.0"),
    (lambda: parse("nnm"), "'nnm' needs a rule after it"),
    (lambda: parse("kum"), "there is no rule 'kum'.*\n.*did you mean krum"),
    (lambda: parse("krum+median"), "'krum' can only be the last"),
    (lambda: parse("bucketing:x+median"), "does not end with a number"),
    (lambda: parse("bucketing:0+median"), "size=0 holds no update"),
    (lambda: parse("clip:nan+median"), "norm=nan"),
    (lambda: parse("median:3"), "'median:3' does not take a number"),
    (lambda: parse(""), "there is no rule ''"),
]


@pytest.mark.parametrize(("ask", "sentence"), ABSURD, ids=[sentence for _, sentence in ABSURD])
def test_what_makes_no_sense_gets_one_sentence(ask: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        ask()
    assert caught.value.hint and "\n" not in caught.value.message


def test_a_file_of_another_size_is_named(tmp_path: Path) -> None:
    (tmp_path / "short").write_bytes(b"1234")
    with pytest.raises(ConfigError, match=r"short has 4 bytes, and 2 numbers of torch.float32 take 8"):
        mapped([tmp_path / "short"], 2)


def test_worker_momentum_is_an_average_over_time_and_goes_on_from_its_state() -> None:
    momentum, kept = WorkerMomentum(0.5), torch.zeros(4)
    for step in range(4):
        gradient = torch.full((4,), float(step))
        kept = gradient if step == 0 else 0.5 * kept + 0.5 * gradient
        sent = momentum.apply({"w": gradient, "count": torch.tensor(step)})
        assert isinstance(sent, dict) and torch.equal(sent["w"], kept) and sent["count"].item() == step
    other = WorkerMomentum(0.0)
    other.load_state_dict(momentum.state_dict())
    after = {"w": torch.ones(4), "count": torch.tensor(9)}
    one, two = momentum.apply(after), other.apply(after)
    assert isinstance(one, dict) and isinstance(two, dict) and torch.equal(one["w"], two["w"])
    with pytest.raises(ConfigError, match="not of the model"):
        momentum.apply(torch.zeros(4))


MEMORY = """
import sys, torch
from pathlib import Path
from holdfast.byzantine import parse

def memory(field):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024

n, d = 20, 1_000_000
x = torch.randn(n, d)
for word in sys.argv[1:]:
    parse(word).aggregate(x[:, :9000], 4)
    out = torch.zeros(d)
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    parse(word).aggregate(x, 4, out=out)
    extra = (memory("VmHWM") - before) / (n * d * 4)
    assert extra < 0.05, (word, extra)
    print(word, extra)
"""


@pytest.mark.processes
def test_no_rule_takes_a_twentieth_of_the_updates_beside_its_result() -> None:
    words = ["median", "trimmed-mean", "meamed", "krum", "geometric-median", "centered-clipping", "nnm+trimmed-mean"]
    done = subprocess.run([sys.executable, "-c", MEMORY, *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == len(words)
