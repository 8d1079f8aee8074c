"""Whether what is to be run can be: looked at before anything is started, and before any worker fails over it."""

from __future__ import annotations

import ast
import importlib.util
import sys
import warnings
import zipfile
from pathlib import Path

from holdfast.core.errors import ConfigError

SOURCE_BYTES_MAX = 16 * 1024 * 1024  # what is larger is looked at by the interpreter alone


def check_script(script: str) -> None:
    """ConfigError unless it is a file that Python can run, as far as that shows without running it."""
    if not script:
        raise ConfigError("the name of the script is empty", hint="give the Python file to run; is a variable unset?")
    path = Path(script)
    try:
        is_there, is_file = path.exists(), path.is_file()
    except (OSError, ValueError) as error:  # a name that is too long, or has a zero byte
        raise ConfigError(f"{script[:80]!r} cannot be the name of a script", hint="check the path") from error
    if not is_there:
        raise ConfigError(
            f"there is no script {script}", hint="check the path; options of holdfast come before the script"
        )
    if not is_file:
        raise ConfigError(f"{script} is not a file", hint="give the Python file to run, or a module with `-m module`")
    try:
        with path.open("rb") as file:
            source = file.read(SOURCE_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"cannot read {script}: {error.strerror}", hint="check its permissions") from error
    if len(source) <= SOURCE_BYTES_MAX and not script.endswith(".pyc") and not zipfile.is_zipfile(path):
        _check_python(script, source)


def _check_python(script: str, source: bytes) -> None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they are the script's, and come when it runs
            ast.parse(source, script)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        if script.endswith(".py"):
            line = f"line {error.lineno}: {error.msg}" if isinstance(error, SyntaxError) else str(error)
            raise ConfigError(f"{script} is not valid Python: {line}", hint="correct that line first") from error
        raise ConfigError(
            f"{script} is not a Python script", hint="holdfast runs Python: a .py file, or a module with `-m module`"
        ) from error


def check_module(module: str) -> None:
    """ConfigError if there is no such module. Only its first name is looked for: more would import packages."""
    first = module.partition(".")[0]
    if not module or not all(part.isidentifier() for part in module.split(".")):
        hint = "for example -m package.train; a file is given without -m"
        raise ConfigError(f"{module[:80]!r} cannot be the name of a module", hint=hint)
    if first in sys.builtin_module_names or first in sys.modules:
        return
    sys.path.insert(0, str(Path.cwd()))  # where `python -m` looks first
    try:
        found = importlib.util.find_spec(first)
    except (ImportError, ValueError):
        found = None
    finally:
        del sys.path[0]
    if found is None:
        raise ConfigError(
            f"there is no module {first} here", hint="start from the directory that has it, or install its package"
        )
