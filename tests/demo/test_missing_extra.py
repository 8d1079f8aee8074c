"""The example without the `demo` extra: one sentence with the command that installs it, alone and under an agent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

DIGITS = Path(__file__).parents[2] / "examples" / "digits.py"
SENTENCE = "digits.py needs scikit-learn for its images: pip install 'holdfast[demo]'"


@pytest.mark.processes
@pytest.mark.timeout(150)
def test_without_scikit_learn_it_says_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "sklearn.py").write_text("raise ImportError(\"No module named 'sklearn'\")\n")
    variables = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    under_agent = ["-m", "holdfast", "run", "--dir", str(tmp_path / "home"), "--workers", "2"]
    for command in ([], under_agent):
        done = subprocess.run(
            [sys.executable, *command, str(DIGITS)],
            capture_output=True,
            text=True,
            env=variables,
            timeout=120,
            check=False,
        )
        assert done.returncode == 2, done.stderr
        assert done.stderr == f"{SENTENCE}\n"
        assert "Traceback" not in done.stdout
