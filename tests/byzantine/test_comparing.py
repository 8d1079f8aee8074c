"""benchmarks/aggregators.py: a library that was not measured is named, and is no bar that was passed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MEASURED = {"seconds": 1.0, "sums": 2.0, "sum_seconds": 0.5, "extra": 0.0}


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    before = set(sys.modules)
    yield import_module("aggregators")
    for name in {"aggregators", "arguments"} & (set(sys.modules) - before):
        del sys.modules[name]


def run(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["aggregators.py", *words])
    result: int = benchmark.main()
    return result


def test_a_library_that_was_not_measured_is_named_in_the_table_the_file_and_the_check(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(who: str, rule: str, *rest: object) -> dict[str, float] | str:
        return MEASURED if who == "holdfast" else "failed: it is broken"

    here = {"byzfl": None, "byzpy": object(), "flwr": object()}
    monkeypatch.setattr(benchmark, "ask", ask)
    monkeypatch.setattr(benchmark.importlib.util, "find_spec", here.get)
    path = tmp_path / "figures.json"
    words = ["--n", "20", "--d", "1e6", "--rules", "median,meamed", "--peers", "byzfl,byzpy", "--json", str(path)]
    assert run(benchmark, monkeypatch, *words, "--check") == 0
    said = capsys.readouterr().out
    reasons = {"byzfl": "not installed", "byzpy": "failed: it is broken", "flwr": "not asked for"}
    for peer, reason in reasons.items():
        assert f"median             {peer:<9} not compared: {reason}" in said
        assert f"not compared: median_n20_d1e+06 with {peer}: {reason}" in said
    assert "meamed_n20_d1e+06 with flwr" not in said, "it has no such rule"
    assert json.loads(path.read_text())["not_compared"]["median_n20_d1e+06"] == reasons

    monkeypatch.setattr(benchmark, "ask", lambda *given: MEASURED | {"seconds": 20.0})
    monkeypatch.setattr(benchmark.importlib.util, "find_spec", lambda name: object())
    assert run(benchmark, monkeypatch, *words[:5], "median", "--json", str(path), "--add", "--check") == 1
    assert json.loads(path.read_text())["not_compared"]["median_n20_d1e+06"] == {}
    assert "median_n20_d1e+06 with" not in capsys.readouterr().out


def test_judging_a_file_names_them_too(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    path.write_text(json.dumps({f"holdfast_krum_n20_d1e+06_{what}": value for what, value in MEASURED.items()}))
    words = ["--judge", "--json", str(path), "--n", "20", "--d", "1e6", "--rules", "krum"]
    assert run(benchmark, monkeypatch, *words) == 0
    assert "not compared: krum_n20_d1e+06 with byzfl: not measured" in capsys.readouterr().out
