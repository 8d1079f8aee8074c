"""A run as curves, and the files in which TensorBoard finds them."""

from __future__ import annotations

import importlib
import warnings
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from holdfast.core.errors import ConfigError
from holdfast.events import EventLog
from holdfast.observe import tensorboard
from holdfast.observe.scalars import TAGS_MAX, Scalars
from holdfast.observe.tensorboard import Curves
from holdfast.placement.directory import RunDirectory


def event(t: float, who: str, kind: str, **fields: Any) -> dict[str, Any]:
    return {"t": t, "who": who, "kind": kind, **fields}


def test_what_becomes_a_curve() -> None:
    scalars = Scalars()
    first = scalars.feed(event(5.0, "w0.1", "progress", step=3, metrics={"loss": 0.5}, samples_per_s=9.0, workers=2))
    assert {(one.tag, one.step, one.value, one.t) for one in first} == {
        ("loss", 3, 0.5, 5.0),
        ("holdfast/samples_per_second", 3, 9.0, 5.0),
        ("holdfast/workers", 3, 2.0, 5.0),
    }
    recovered = event(6.0, "w0.1", "recovered", view=2, step=4, duration_s=0.2)
    assert [one.tag for one in scalars.feed(recovered)] == ["holdfast/recovery_seconds"]
    assert scalars.feed({**recovered, "who": "w1.1"}) == []  # every survivor tells
    scalars.feed(event(7.0, "w0.1", "spent", seconds={"computing": 1.5, "waiting": 0.5}, doing="computing"))
    shares = {one.tag: one.value for one in scalars.feed(event(7.0, "w0.1", "progress", step=5))}
    # w1.1, of which nothing more is known, starts for a second.
    assert shares["holdfast/goodput"] == 1.0 and shares["holdfast_time/computing"] == pytest.approx(0.5)


def test_what_was_recorded_outside_the_shards_is_a_curve_too() -> None:
    scalars = Scalars()
    recorded = event(5.0, "w0.1", "recorded", step=8, metrics={"val_loss": 0.25}, best=True)
    assert scalars.feed(recorded) == [("val_loss", 8, 0.25, 5.0)]
    assert scalars.feed({**recorded, "who": "w1.1@b"}) == []  # every host's first worker tells
    assert scalars.feed({**recorded, "step": 9}) == [("val_loss", 9, 0.25, 5.0)]


def test_nonsense_and_too_many_names_are_passed_over() -> None:
    scalars = Scalars()
    assert scalars.feed({}) == [] and scalars.feed(event(1.0, "w0.1", "progress", step="x")) == []
    many = event(1.0, "w0.1", "progress", step=1, metrics={f"m{n}": 1.0 for n in range(2 * TAGS_MAX)})
    assert len(scalars.feed(many)) == TAGS_MAX == len(scalars.feed(many))


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path, "first")
    directory.create()
    return directory


def test_tensorboard_reads_what_was_written(run: RunDirectory, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the reader's own
        reading = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    EventLog(run.events / "w0.1.jsonl", "w0.1", wall_clock=lambda: 5.0).write("progress", step=1, metrics={"loss": 9.0})
    log = EventLog(run.events / "w1.1.jsonl", "w1.1")
    with closing(Curves(run.events, tmp_path / "curves")):
        for step in range(10):
            log.write("progress", step=step, metrics={"loss": 1.0 / (step + 1)}, samples_per_s=5.0, workers=2)
        log.write("checkpoint", step=10, bytes=1, duration_s=0.5, held_s=0.01)
    found = reading.EventAccumulator(str(tmp_path / "curves"))
    found.Reload()
    loss = [(one.step, one.value) for one in found.Scalars("loss")]
    assert loss == [(step, pytest.approx(1.0 / (step + 1))) for step in range(10)]  # not of an earlier agent's time
    assert found.Scalars("holdfast/checkpoint_seconds")[0].value == 0.5
    assert len(found.Scalars("holdfast/workers")) == 10


def test_without_the_package_it_is_said_before_anything_starts(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(tensorboard.importlib, "import_module", missing)
    with pytest.raises(ConfigError, match="needs the package tensorboard") as refused:
        Curves(run.events, Path("x"))
    assert "holdfast[tensorboard]" in str(refused.value)
