"""How a function comes to a run's workers: as a script in the run's directory, which the agent runs like any other.

A function of a module is imported by its name. One of the script that is running is taken from its file, which is run
once more in each worker, under another name than `__main__`. One of a notebook's cells comes with its source
(session_source.py). Its arguments go as data beside the script (state/objects.py). Nothing is pickled, and both files
belong to the run's owner alone: docs/decisions/0016-functions-travel-as-source.md.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

from holdfast.core.errors import ConfigError
from holdfast.launching.calling import ARGUMENTS, ARGUMENTS_BYTES_MAX, SCRIPT
from holdfast.launching.session_source import written_of

_HEAD = '''"""Written by holdfast.launch, and again by the next one: what the workers of this run execute."""
'''
_TAIL = """
# ---- the call
import os, sys
from holdfast.launching.calling import call, function_of_file, value

sys.path[:] = {path!r}
"""


class FunctionScript:
    """A function and its arguments, checked, ready to be written into a run's directory."""

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        function = checked_function(fn)
        _check_arguments(function, args, kwargs)
        self.name = function.__name__
        body, values = _body_of(function)
        self.text = body
        from holdfast.state.objects import pack_object  # loads torch

        packed = {
            what: pack_object(held, path=f"{what} of {self.name}", bytes_max=ARGUMENTS_BYTES_MAX)
            for what, held in (("args", list(args)), ("kwargs", dict(kwargs)), ("values", values))
        }
        self.arguments = json.dumps(packed)

    def write(self, directory: Path) -> Path:
        """Into the run's directory, for its owner only; the path of the script."""
        write_private(directory / ARGUMENTS, self.arguments)
        write_private(directory / SCRIPT, self.text)
        return directory / SCRIPT


def write_private(path: Path, text: str) -> None:
    """Whole or not at all, and readable for the owner only from the first byte on."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.unlink(missing_ok=True)
    with os.fdopen(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    partial.replace(path)


def checked_function(fn: Any) -> FunctionType:
    """ConfigError unless it is an ordinary function that another process can get at."""
    if not callable(fn):
        raise ConfigError(
            f"launch was given a {type(fn).__name__} and needs a function", hint="holdfast.launch(train, workers=4)"
        )
    if not isinstance(fn, FunctionType):
        raise ConfigError(
            f"launch was given a {type(fn).__name__}, which cannot be sent to the workers",
            hint="give it a function made with `def`; what it is to be called with goes into args=(…) and kwargs={…}",
        )
    if inspect.iscoroutinefunction(fn) or inspect.isgeneratorfunction(fn):
        raise ConfigError(
            f"{fn.__name__} is no ordinary function: calling it does not run it",
            hint="define it with `def`, without `async` and `yield`",
        )
    if "<" in fn.__qualname__:  # <lambda>, or within <locals>
        where = "a lambda" if fn.__name__ == "<lambda>" else f"defined inside {fn.__qualname__.partition('.<')[0]}"
        raise ConfigError(
            f"the function to launch is {where}, where workers cannot get at it",
            hint="define it with `def` at the top of a module, a script or a cell, and pass values with args=(…)",
        )
    return fn


def _check_arguments(fn: FunctionType, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    try:
        inspect.signature(fn).bind(*args, **kwargs)
    except TypeError as error:
        raise ConfigError(
            f"{fn.__name__} cannot be called with these arguments: {error}", hint="see args= and kwargs= of launch"
        ) from error


def _body_of(fn: FunctionType) -> tuple[str, dict[str, Any]]:
    """The script, and the values that it asks for."""
    path = [entry or str(Path.cwd()) for entry in sys.path]
    tail = _TAIL.format(path=path)
    if fn.__module__ != "__main__":
        return f"{_HEAD}import holdfast\n{tail}{_import_lines(fn)}", {}
    if (module := _module_of_main(fn)) is not None:
        return f"{_HEAD}import holdfast\n{tail}{_import_lines(fn, module)}", {}
    if (file := _file_of_main(fn)) is not None:
        call = f"call(function_of_file({file!r}, {fn.__qualname__!r}))\n"
        return f"{_HEAD}import holdfast\n{tail}sys.argv[:] = {sys.argv!r}\n{call}", {}
    if fn.__name__ != fn.__qualname__:
        raise ConfigError(
            f"{fn.__qualname__} is part of a class of this session", hint="give launch a function that stands by itself"
        )
    written = written_of(fn)
    future, rest = _futures_first(written.text())
    head = f"{_HEAD}{future}import holdfast\n{tail}"
    return f"{head}\n# ---- from the session\n{rest}\n\ncall({fn.__name__})\n", written.values


def _futures_first(text: str) -> tuple[str, str]:
    lines = text.splitlines(keepends=True)
    future = [line for line in lines if line.startswith("from __future__ ")]
    return "".join(future), "".join(line for line in lines if line not in future)


def _import_lines(fn: FunctionType, module: str = "") -> str:
    module = module or fn.__module__
    _check_importable(fn, module)
    outermost = fn.__qualname__.partition(".")[0]
    return f"from {module} import {outermost}\n\ncall({fn.__qualname__})\n"


def _check_importable(fn: FunctionType, module: str) -> None:
    held: Any = sys.modules.get(fn.__module__)
    for name in fn.__qualname__.split("."):
        held = getattr(held, name, None)
    try:
        found = importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        found = False
    if found and callable(held) and inspect.unwrap(held) is inspect.unwrap(fn):
        return
    raise ConfigError(
        f"workers cannot import {fn.__qualname__} from {module}",
        hint="define it at the top of a module that `import` finds, and give launch the function as the module has it",
    )


def _module_of_main(fn: FunctionType) -> str | None:
    """The name under which `python -m package.module` is imported."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    name = getattr(spec, "name", "") or ""
    if not name or fn.__code__.co_filename != getattr(spec, "origin", None):
        return None
    return name


def _file_of_main(fn: FunctionType) -> str | None:
    """The script that this process runs, if the function is from there."""
    file = getattr(sys.modules["__main__"], "__file__", None)
    if not file or not Path(file).is_file() or not inspect.unwrap(fn).__code__.co_filename:
        return None
    path = Path(file).resolve()
    return str(path) if Path(inspect.unwrap(fn).__code__.co_filename).resolve() == path else None
