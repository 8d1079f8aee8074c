"""Validation, the best model and early stopping: the same in a quiet run of one worker as where leaders die."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from harness import DEADLINE_S, Training, holdfast

from holdfast.events import read_events

pytestmark = pytest.mark.processes
SCRIPT = str(Path(__file__).with_name("validated.py"))


def seen(home: Path) -> dict[str, dict[str, Any]]:
    """By worker and place: what its script came to see there."""
    found: dict[str, dict[str, Any]] = {}
    for path in home.glob("seen-*.jsonl"):
        for line in path.read_text().splitlines():
            told = json.loads(line)
            found.setdefault(path.stem.removeprefix("seen-"), {})[told.pop("at")] = told
    return found


def best_file(home: Path) -> bytes:
    place = home / "best.safetensors"
    done = holdfast(
        *("checkpoint", "export", str(home / "place"), "--best", "val_loss:min", "--only", "parameters"),
        *("--to", str(place)),
        home=home,
    )
    assert done.returncode == 0, done.stderr
    return place.read_bytes()


def options(home: Path, workers: int) -> list[str]:
    return ["--workers", str(workers), "--checkpoint", str(home / "place"), "--keep", "1", "--save-every", "1000",
            "--keep-best", "val_loss:min"]  # fmt: skip


def check_same(found: dict[str, dict[str, Any]], places: dict[str, Any]) -> None:
    """Every worker saw what the quiet one saw. Who passes a loop is told its results, and has the newest values."""
    for worker, told in found.items():
        for place, values in told.items():
            names = ("val_loss", "val_accuracy") if place == "between" else values
            for name in names:
                assert values[name] == places[place][name], f"{worker} at {place}: {name}"


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], bytes]:
    """One worker, and nothing happens to it."""
    home = tmp_path_factory.mktemp("quiet")
    done = holdfast("run", "--run", "r", *options(home, 1), SCRIPT, str(home), home=home)
    assert done.returncode == 0, done.stdout + done.stderr
    found = seen(home)["w0.1"]
    assert found["end"]["stopped"] and 16 < found["end"]["step"] < 400, found["end"]
    assert "the best so far" in done.stdout and "the script ends the training at step" in done.stdout
    return found, best_file(home)


@contextmanager
def faulty(home: Path, workers: int, *more: str, kills: str) -> Iterator[Training]:
    """Leaders die where the script is told so. It goes on beyond its first step when `home / "hold"` is there."""
    run = Training(home, *options(home, workers), *more, script=[SCRIPT, str(home)])
    run._variables.update(TEST_KILLS=kills, TEST_HOLD=str(home / "hold"), TEST_WORKERS=str(workers))
    run.start()
    try:
        yield run
    except BaseException:
        print(run.log()[-8000:])
        raise
    finally:
        run.end()


def test_leaders_die_in_evaluations_and_workers_join(tmp_path: Path, quiet: tuple[dict[str, Any], bytes]) -> None:
    with faulty(tmp_path, 3, "--spares", "3", kills="in 3,after 8,in 11,after 19") as run:
        run.wait(lambda: len(run.living_registered()) == 6, "three spares", DEADLINE_S)
        (tmp_path / "hold").touch()
        digest = run.finish(DEADLINE_S)
    places, best = quiet
    found = seen(tmp_path)
    assert digest == places["end"]["digest"]
    assert sum("end" in told for told in found.values()) >= 2 and len(found) >= 5, found.keys()
    check_same(found, places)
    assert best_file(tmp_path) == best
    events = read_events(run.directory.events)
    recorded = {event["step"]: event["metrics"] for event in events if event["kind"] == "recorded"}
    assert recorded == {
        (8 if place == "between" else int(place) + 1): told["newest"]
        for place, told in places.items()
        if place != "end"
    }
    assert {event["step"] for event in events if event["kind"] == "early_stop"} == {places["end"]["step"]}
    for died in ("in-3", "after-8", "in-11", "after-19"):
        assert (tmp_path / died).exists(), "somebody died there"


def test_everybody_dies_after_the_stop(tmp_path: Path, quiet: tuple[dict[str, Any], bytes]) -> None:
    """Who starts again knows that the training is over, and what was recorded in it."""
    (tmp_path / "hold").touch()
    with faulty(tmp_path, 2, kills="all stopped") as run:
        digest = run.finish(DEADLINE_S)
    places, best = quiet
    assert digest == places["end"]["digest"] and best_file(tmp_path) == best
    found = seen(tmp_path)
    assert [worker for worker, told in found.items() if "end" in told] and "end" not in found["w0.1"]
    check_same(found, places)
    assert [event for event in read_events(run.directory.events) if event["kind"] == "resumed"]
