"""Horovod's API for TensorFlow and Keras, case by case, with 2 and 3 workers: see tensorflow_cases.py."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.horovod.test_conformance import call_cases

CASES_MIN = 130  # so that a file of cases that says nothing is seen


@pytest.mark.processes
@pytest.mark.xdist_group("horovod")
@pytest.mark.skipif(find_spec("tensorflow") is None, reason="TensorFlow is an extra")
@pytest.mark.parametrize("workers", [2, 3])
def test_all_cases(workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
    # Making a graph can hold the interpreter for longer than a lease, on a machine that has much else to do.
    options = ["--workers", str(workers), "--horovod", "--lease", "30s"]
    found = call_cases("tensorflow_cases", options, tmp_path)
    output, code = found.pop("")
    wrong = {name: [why for why in said if why] for name, said in found.items() if any(said)}
    assert not wrong, "\n".join(f"{name}:\n{said[0]}" for name, said in wrong.items())
    assert code == "0", output[-3000:]
    assert len(found) >= CASES_MIN and all(len(said) == workers for said in found.values())
