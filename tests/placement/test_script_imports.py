"""What a script imports is read from its text, and only installed packages are named."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.placement.script_imports import Import, imports_of, imports_of_command, imports_of_module


def written(directory: Path, **files: str) -> Path:
    for name, text in files.items():
        path = directory / f"{name.replace('_of_', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return directory / "train.py"


def modules(found: list[Import]) -> list[str]:
    return [one.module for one in found]


def test_packages_and_the_standard_library_in_the_order_of_the_text(tmp_path: Path) -> None:
    script = written(
        tmp_path, train="import json\nimport torch.nn as nn, holdfast\nfrom numpy.linalg import norm, inv\n"
    )
    assert imports_of(script) == [
        Import("json"),
        Import("torch.nn"),
        Import("holdfast"),
        Import("numpy.linalg", ("norm", "inv")),
    ]


def test_modules_of_its_own_are_read_and_not_named(tmp_path: Path) -> None:
    script = written(
        tmp_path,
        train="from models import net\nimport helper\nraise SystemExit('this must not run')\n",
        helper="import torch\nimport train\n",  # in a circle
        models_of___init__="",
        models_of_net="import numpy\n",
    )
    assert modules(imports_of(script)) == ["numpy", "torch"]


def test_a_file_beside_the_script_hides_a_package_of_its_name(tmp_path: Path) -> None:
    script = written(tmp_path, train="import numpy\n", numpy="import torch\n")
    assert modules(imports_of(script)) == ["torch"]


def test_only_what_is_imported_for_sure(tmp_path: Path) -> None:
    script = written(
        tmp_path,
        train="def later():\n    import numpy\nif False:\n    import yaml\n"
        "try:\n    import torch\nexcept ImportError:\n    import safetensors\nfrom . import x\n",
    )
    assert modules(imports_of(script)) == ["torch"]


@pytest.mark.parametrize("package", ["tensorflow", "mpi4py", "jax"])
def test_what_starts_threads_when_imported_is_left_out(tmp_path: Path, package: str) -> None:
    script = written(tmp_path, train=f"import {package}\nfrom {package}.x import y\n")
    assert imports_of(script) == []


@pytest.mark.parametrize("text", ["def (", "\0", "import no_such_package_at_all\n"])
def test_a_script_that_cannot_run_is_the_workers_business(tmp_path: Path, text: str) -> None:
    assert imports_of(written(tmp_path, train=text)) == []


def test_a_script_that_is_not_there(tmp_path: Path) -> None:
    assert imports_of(tmp_path / "none.py") == []


def test_a_module_of_the_working_directory_and_an_installed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, ours_of___init__="", ours_of___main__="import torch\n", ours_of_other="import numpy\n")
    monkeypatch.chdir(tmp_path)
    assert modules(imports_of_module("ours")) == ["torch"]
    assert modules(imports_of_module("ours.other")) == ["numpy"]
    assert modules(imports_of_module("torch.utils")) == ["torch"]
    assert modules(imports_of_module("holdfast.testing.faults")) == ["holdfast"]
    assert imports_of_module("nothing.there") == []


@pytest.mark.parametrize(
    "line",
    [
        "os.environ['HF_HOME'] = '/data'",
        "os.environ.setdefault('HF_HOME', '/data')",
        "environ['HF_HOME'] = '/data'",
        "load_dotenv()",
        "sys.path.insert(0, '..')",
        "if True:\n    os.environ['A'] = 'b'",
        "def prepare():\n    os.putenv('A', 'b')\nprepare()",
        "try:\n    os.environ['A']\nexcept KeyError:\n    pass",
        "import settings",
    ],
)
def test_nothing_after_what_it_may_look_at_was_set(tmp_path: Path, line: str) -> None:
    script = written(
        tmp_path,
        train=f"import os, sys\nimport numpy\n{line}\nimport torch\n",
        settings="import os\nos.environ['A'] = 'b'\n",
    )
    assert modules(imports_of(script)) == ["os", "sys", "numpy"]


@pytest.mark.parametrize(
    "line",
    [
        "torch_home = 'environment'",
        "def rank():\n    return os.environ['RANK']",
        "rank = lambda: os.environ['RANK']",
        "class A:\n    def rank(self):\n        return os.environ['RANK']",
        "here = os.path.dirname(__file__)",
    ],
)
def test_what_does_no_harm(tmp_path: Path, line: str) -> None:
    script = written(tmp_path, train=f"import os\n{line}\nimport torch\n")
    assert modules(imports_of(script)) == ["os", "torch"]


def test_a_starter_that_runs_a_script(tmp_path: Path) -> None:
    script = str(written(tmp_path, train="import numpy\n"))
    assert modules(imports_of_command(["-m", "holdfast.drills.rig", script, "--steps", "3"])) == ["holdfast", "numpy"]
    assert modules(imports_of_command(["-m", "holdfast.drills.rig", "--steps", script])) == ["holdfast"]
    assert modules(imports_of_command([script, "other.py"])) == ["numpy"]
