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
EXAMPLES = Path(__file__).parents[3] / "examples"
BLOCKED = "import sys, holdfast; sys.modules[{package!r}] = None\nimport holdfast.integrations.{module} as it\n"


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


@pytest.mark.parametrize(("name", "backend"), [("keras_digits.py", "torch"), ("tensorflow_digits.py", "tensorflow")])
def test_the_examples_learn_what_they_say(name: str, backend: str, tmp_path: Path) -> None:
    if any(find_spec(one) is None for one in ("keras", backend, "sklearn")):
        pytest.skip(f"there is no Keras on {backend} here, or no scikit-learn")
    done = python(str(EXAMPLES / name), "--epochs", "4", KERAS_BACKEND=backend, KERAS_HOME=str(tmp_path))
    found = re.search(r"^accuracy (0\.\d+) on images.*\nweights \w{32}$", done.stdout, re.MULTILINE)
    assert done.returncode == 0 and found is not None, done.stdout[-2000:] + done.stderr[-2000:]
    assert float(found[1]) > 0.8


SHUFFLED = """
import warnings, tensorflow as tf
from holdfast.integrations.variables.arrays import batches_of_pipeline
warnings.simplefilter("always")
rows = tf.data.Dataset.range(8)
for again, seed in ((True, 1), (None, None), (False, None), (False, 1)):
    one = rows.shuffle(8, seed=seed, reshuffle_each_iteration=again).batch(4).prefetch(1)
    with warnings.catch_warnings(record=True) as said:
        batches_of_pipeline(one, 2)
        batches_of_pipeline(rows.batch(4), 2)
    print("warned", len(said), *{"another order whenever it is read" in str(one.message) for one in said})
"""


@pytest.mark.skipif(find_spec("tensorflow") is None, reason="there is no TensorFlow here")
def test_a_pipeline_that_shuffles_anew_is_told_of() -> None:
    done = python("-c", SHUFFLED)
    assert re.findall(r"^warned (.*)", done.stdout, re.MULTILINE) == ["1 True"] * 3 + ["0"], done.stderr[-2000:]


@pytest.mark.parametrize(
    ("module", "package", "name"), [("tensorflow", "tensorflow", "join"), ("keras", "keras", "distribute")]
)
def test_a_missing_package_is_one_sentence(module: str, package: str, name: str) -> None:
    code = BLOCKED.format(package=package, module=module)
    code += f"try:\n    it.{name}\nexcept holdfast.ConfigError as error:\n    print(error)"
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
