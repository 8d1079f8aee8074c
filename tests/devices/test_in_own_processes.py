"""What computes on the simulated device needs a process in which autograd has not worked before the device was there,
and in which nothing has worked before a worker is forked: each of these files is run by a pytest of its own.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import device as simulated

HERE = Path(__file__).parent
CASES = [
    ("simulated_device_cases.py", ""),
    ("copies_cases.py", ""),
    ("fingerprint_cases.py", ""),
    ("training_cases.py", "any_number_of_workers"),
    ("training_cases.py", "process_group"),
    ("training_cases.py", "two_hosts or killed_worker"),
    ("training_cases.py", "joiner or checkpoint"),
    ("training_cases.py", "never_waits"),
    ("mutant_cases.py", ""),
]  # a file, and of its cases those with one of these words in their names


@pytest.mark.parametrize("file", sorted(HERE.glob("*_cases.py")), ids=lambda file: str(file.name))
def test_no_case_is_forgotten(file: Path) -> None:
    chosen = [word for name, words in CASES if name == file.name for word in words.split(" or ")]
    names = [one.name for one in ast.parse(file.read_text()).body if isinstance(one, ast.FunctionDef)]
    cases = [name for name in names if name.startswith("test_")]
    assert cases and chosen
    assert not [name for name in cases if not any(word in name for word in chosen)], "no process runs these"


@pytest.mark.processes
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("file", "chosen"), CASES, ids=lambda value: str(value).replace(" ", "_"))
def test_the_cases_hold(file: str, chosen: str) -> None:
    if not simulated.is_built():
        pytest.skip("the simulated device is not compiled: make install does it, where g++ is")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / file), "-k", chosen]
    done = subprocess.run(command, cwd=HERE.parents[1], capture_output=True, text=True, timeout=880, check=False)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-6000:] + done.stderr[-2000:]
