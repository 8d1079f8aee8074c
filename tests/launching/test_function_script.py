"""What launch refuses before anything is started, and what the script of a module's function looks like."""

from __future__ import annotations

import functools
import stat
from pathlib import Path
from typing import Any

import pytest

import holdfast
from holdfast.core.errors import ArgumentError, ConfigError
from holdfast.launching.function_script import FunctionScript
from tests.launching import training


async def waiting() -> None: ...


def pairs() -> Any:
    yield 1


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (3, "launch was given a int and needs a function"),
        (functools.partial(training.train, 3), "launch was given a partial"),
        (lambda: 1, "is a lambda"),
        ([].append, "cannot be sent to the workers"),
        (waiting, "waiting is no ordinary function"),
        (pairs, "pairs is no ordinary function"),
    ],
)
def test_what_is_no_function_of_a_module_is_refused(fn: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        holdfast.launch(fn, workers=2)


def test_a_function_within_another_is_refused() -> None:
    def inner() -> None: ...

    with pytest.raises(ConfigError, match="is defined inside test_a_function_within_another"):
        holdfast.launch(inner, workers=2)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"workers": 0}, "the number of workers is 0"),
        ({"workers": "two"}, "workers='two'"),
        ({"workers": 2, "args": (1, 2)}, "train cannot be called with these arguments"),
        ({"workers": 2, "kwargs": {"steps": object()}}, "is a object, which cannot travel"),
        ({"workers": 2, "spars": 1}, "launch has no argument spars"),
        ({"workers": 2, "spares": -1}, "--spares is -1"),
        ({"workers": 2, "ledger": "etcd://a:2379"}, "ledger= is for a run on several hosts"),
        ({"workers": 2, "run": "a b"}, "cannot be the name of a run"),
    ],
)
def test_wrong_arguments_are_told_before_anything_is_started(
    options: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said):
        holdfast.launch(training.train, dir=tmp_path, **options)
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").glob("*/run.json"))


def test_an_unknown_option_is_a_type_error_too() -> None:
    with pytest.raises(ArgumentError, match="dashboards") as caught:
        holdfast.launch(training.train, workers=2, dashboards=1)
    assert "dashboard" in caught.value.hint


def test_both_files_are_the_owners_alone_and_hold_no_pickle(tmp_path: Path) -> None:
    script = FunctionScript(training.train, (3,), {"lr": 0.5})
    path = script.write(tmp_path)
    assert "from tests.launching.training import train\n\ncall(train)" in path.read_text()
    for written in tmp_path.iterdir():
        assert stat.S_IMODE(written.stat().st_mode) == 0o600
        assert b"\x80" not in written.read_bytes()  # with which a pickle begins


def test_a_worker_does_not_launch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {"RUN_DIR": str(tmp_path), "WORKER": "w0.1", "SOCKET_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(f"HOLDFAST_{name}", value)
    from holdfast.placement.environment import WorkerEnvironment

    monkeypatch.setattr(WorkerEnvironment, "from_variables", classmethod(lambda cls: object()))
    with pytest.raises(ConfigError, match="in a worker of a run"):
        holdfast.launch(training.train, workers=2)
