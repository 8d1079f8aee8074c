"""Keras and TensorFlow are extras: nothing imports them unasked, and one sentence says what is missing."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = "{'tensorflow', 'keras', 'jax', 'torch'}"


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_holdfast_and_its_integrations_imports_no_framework() -> None:
    names = "holdfast, holdfast.integrations.keras, holdfast.integrations.tensorflow, holdfast.cli.main"
    assert python(f"import sys, {names}; print(sorted({HEAVY} & sys.modules.keys()))") == "[]\n"


@pytest.mark.parametrize(
    ("module", "name", "lacks", "extra"),
    [("keras", "distribute", "keras", "holdfast[keras]"), ("tensorflow", "join", "tensorflow", "holdfast[tensorflow]")],
)
def test_what_is_missing_is_one_sentence_with_the_command(module: str, name: str, lacks: str, extra: str) -> None:
    code = f"import sys; sys.modules[{lacks!r}] = None; import holdfast.integrations.{module} as face; "
    code += f"from holdfast.core.errors import ConfigError\ntry: face.{name}\n"
    code += "except ConfigError as error: print(error.message, '|', error.hint)"
    said = python(code)
    assert f"there is no {lacks} here" in said and extra in said, said
