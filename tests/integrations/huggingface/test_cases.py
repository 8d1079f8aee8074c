"""Hugging Face in a run of one (cases.py), and what is said where a package is missing: in processes of their own."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.integrations.pages import held_cases, python

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


@pytest.mark.skipif(find_spec("transformers") is None, reason="there are no transformers here")
def test_case_by_case(tmp_path: Path) -> None:
    held_cases(Path(__file__).with_name("cases.py"), tmp_path)


@pytest.mark.parametrize(("package", "name"), [("transformers", "distribute"), ("accelerate", "Accelerator")])
def test_a_missing_package_is_one_sentence(package: str, name: str) -> None:
    done = python(
        "-c",
        f"import sys; sys.modules[{package!r}] = None\nimport holdfast, holdfast.integrations.huggingface as it\n"
        f"try:\n    it.{name}\nexcept holdfast.ConfigError as error:\n    print(error)",
    )
    assert f"there is no {package} here" in done.stdout and "pip install 'holdfast[huggingface]'" in done.stdout, done
