"""Streams given to join: what a drill is told of them, what may be given beside them, and who is not let in."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.data import Mixture, Stream
from holdfast.drills.conduct import _indices
from holdfast.drills.rig import Tracer
from tests.harness.forked import forked

Join = Callable[..., holdfast.Run]


@pytest.mark.parametrize("options", [{}, {"shuffle": False}, {"generator": torch.Generator().manual_seed(9)}])
def test_a_drill_knows_which_samples_a_stream_has_where(options: dict[str, Any], joined: Join, tmp_path: Path) -> None:
    """From what the worker's trace says, without the data."""
    model = torch.nn.Linear(1, 1)
    for name, size in (("a", 40), ("b", 17), ("c", 30)):
        (tmp_path / f"{name}.txt").write_text("1\n" * size)
    stream = Stream(tmp_path / "*.txt", decode=float, shuffle_buffer=16, block=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = joined(model, optimizer, stream, batch_size=8, shards=4, seed=3, **options)
    told = json.loads(json.dumps(Tracer(run, tmp_path)._plan()))
    indices = _indices(told)
    assert indices is not None
    steps = [[indices(step, shard) for shard in range(4)] for step in range(30)]
    assert steps == [[run.plan.indices(step, shard) for shard in range(4)] for step in range(30)]
    assert sorted([number for step in steps[:11] for one in step for number in one][:87]) == list(range(87))
    assert (steps[0][0] == [0, 1]) == (options.get("shuffle") is False)


def test_of_packed_streams_a_drill_is_told_that_it_is_the_streams_word(joined: Join, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, [[1, 2], [3], [4, 5]] * 10)))
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stream = Stream(tmp_path / "x.jsonl", decode=json.loads, pack=4)
    run = joined(model, optimizer, stream, batch_size=4, shards=2)
    assert Tracer(run, tmp_path)._plan()["sampler"] == "stream"


def lines(path: Path, numbers: range) -> Path:
    path.write_text("".join(f"{number}\n" for number in numbers))
    return path


def trained(join: Join, dataset: Any, **options: Any) -> str:
    torch.manual_seed(0)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    run = join(model, optimizer, dataset, **{"batch_size": 8, "shards": 4, **options})
    for step in run.epochs(2):
        for x in step:
            model(x.float()[:, None]).square().mean().backward()
        optimizer.step()
    run.close()
    return run.digest()


def test_a_stream_takes_what_other_datasets_take(joined: Join, tmp_path: Path) -> None:
    """Loader processes, a sampler in place of its order, the modes, and a validation."""
    stream = Stream(lines(tmp_path / "x.txt", range(50)), decode=float, shuffle_buffer=16, block=2)
    plain = trained(joined, stream)
    assert trained(joined, stream, num_workers=1) == plain == trained(joined, stream, mode=holdfast.Elastic())
    assert trained(joined, stream, sampler=range(50)) == trained(joined, stream, shuffle=False) != plain
    mixture = Mixture([(stream, 2), (Stream(lines(tmp_path / "y.txt", range(50, 60)), decode=float), 1)])
    assert trained(joined, mixture) == trained(joined, mixture) != trained(joined, mixture, seed=1)
    model = torch.nn.Linear(1, 1)
    run = joined(model, torch.optim.SGD(model.parameters(), lr=0.1), stream, batch_size=8, shards=4)
    assert run.evaluate(stream, lambda x: {"mean": x.mean()}, batch_size=7) == {"mean": 24.5}


@pytest.mark.processes
@pytest.mark.timeout(60)
def test_a_worker_with_other_files_is_not_let_in(tmp_path: Path) -> None:
    """The same number of samples, in files of other sizes."""
    files = {name: lines(tmp_path / name, range(first, first + 40)) for name, first in (("a.txt", 10), ("b.txt", 100))}

    def body(name: str) -> str:
        return trained(holdfast.join, Stream(files[name], decode=float))

    outcomes = forked({"w0.1": lambda: body("a.txt"), "w1.1": lambda: body("b.txt")}, size=1)
    errors = [outcome.error for outcome in outcomes.values() if outcome.error]
    assert len(errors) == 1
    assert "this worker's sampler or stream gives another order of samples than the run's" in errors[0]
