"""Keras' fit in a run of one (fit_cases.py), and what is said where a package is missing: in processes of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [pytest.mark.processes, pytest.mark.timeout(200)]
CASES = Path(__file__).with_name("fit_cases.py")
BLOCKED = "import sys; sys.modules[{package!r}] = None\nimport holdfast.integrations.{module} as it\n"


def python(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", **variables}
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=180, env=environment, check=False
    )


@pytest.mark.skipif(find_spec("keras") is None, reason="there is no Keras here")
def test_fit_case_by_case(tmp_path: Path) -> None:
    done = python(str(CASES), KERAS_BACKEND="torch", KERAS_HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr[-4000:]
    expected = re.findall(r"^def (case_\w+)", CASES.read_text(), re.MULTILINE)
    assert re.findall(r"^held (\w+)", done.stdout, re.MULTILINE) == expected


@pytest.mark.parametrize(
    ("module", "package", "name"), [("tensorflow", "tensorflow", "join"), ("keras", "keras", "distribute")]
)
def test_a_missing_package_is_one_sentence(module: str, package: str, name: str) -> None:
    code = BLOCKED.format(package=package, module=module)
    code += f"import holdfast\ntry:\n    it.{name}\nexcept holdfast.ConfigError as error:\n    print(error)"
    done = python("-c", code)
    assert f"there is no {package} here" in done.stdout and f"pip install 'holdfast[{module}]'" in done.stdout, done


def test_nothing_imports_them_unasked() -> None:
    code = (
        "import sys, holdfast, holdfast.cli.main, holdfast.integrations.keras, holdfast.integrations.tensorflow\n"
        "holdfast.join\n"
        "sys.exit(', '.join({'keras', 'tensorflow', 'jax'} & set(sys.modules)) or 0)"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
