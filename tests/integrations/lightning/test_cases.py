"""HoldfastStrategy in a run of one (cases.py), and what is said where Lightning is missing: in other processes."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.integrations.pages import held_cases, python

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]


@pytest.mark.skipif(find_spec("lightning") is None, reason="there is no Lightning here")
def test_case_by_case(tmp_path: Path) -> None:
    held_cases(Path(__file__).with_name("cases.py"), tmp_path)


def test_a_missing_package_is_one_sentence() -> None:
    done = python(
        "-c",
        "import sys; sys.modules['lightning'] = None\nimport holdfast, holdfast.integrations.lightning as it\n"
        "try:\n    it.HoldfastStrategy\nexcept holdfast.ConfigError as error:\n    print(error)",
    )
    assert "there is no lightning here" in done.stdout and "pip install 'holdfast[lightning]'" in done.stdout, done


def test_nothing_imports_it_unasked() -> None:
    modules = "holdfast, holdfast.cli.main, holdfast.integrations.lightning, holdfast.integrations.huggingface"
    heavy = {"lightning", "transformers", "accelerate"}
    code = f"import sys, {modules}\nsys.exit(', '.join({heavy} & set(sys.modules)) or 0)"
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
