"""What a script will import, read from its text without running any of it.

Only installed packages are named: the script's own modules may do anything when they are imported, so they are read
in turn instead, for the packages that they import.
"""

from __future__ import annotations

import ast
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from itertools import chain
from pathlib import Path

FILES_MAX = 200
# They start threads, or talk to others, as soon as they are imported: not to be had before a fork.
NOT_BEFORE_A_FORK = frozenset(
    ("cupy", "horovod", "jax", "keras", "mpi4py", "pyspark", "ray", "tensorflow", "torch_xla", "wandb")
)


@dataclass(frozen=True)
class Import:
    """`import module`, or `from module import names`."""

    module: str
    names: tuple[str, ...] = ()

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]


def imports_of_command(arguments: Sequence[str]) -> list[Import]:
    """Of `script.py …`, of `-m module …`, and of `-m starter script.py …`: a module that runs a script."""
    if arguments[0] != "-m":
        return imports_of(Path(arguments[0]))
    started = [imports_of(Path(word)) for word in arguments[2:3] if word.endswith(".py")]
    return [*imports_of_module(arguments[1]), *chain.from_iterable(started)]


def imports_of(script: Path) -> list[Import]:
    """The installed packages that it and its own modules import at their top, in the order of the text."""
    return _Search(script.resolve().parent).search(script)


def imports_of_module(name: str) -> list[Import]:
    """The same of a module that runs from the working directory, or of an installed one: itself."""
    search = _Search(Path.cwd())
    package = Import(name).package
    if _is_installed(package, search.directory):
        return [Import(package)] if package not in NOT_BEFORE_A_FORK else []
    for path in search.files(Import(name, ("__main__",))):
        search.search(path)
    return list(search.found)


@dataclass
class _Search:
    directory: Path
    found: dict[Import, None] = field(default_factory=dict)
    seen: set[Path] = field(default_factory=set)

    def search(self, script: Path) -> list[Import]:
        waiting = [script.resolve()]
        while waiting and len(self.seen) < FILES_MAX:
            path = waiting.pop(0)
            if path not in self.seen:
                self.seen.add(path)
                waiting += self._read(path)
        return list(self.found)

    def _read(self, path: Path) -> list[Path]:
        """Take note of what the file imports; returns the modules of its own that it does."""
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, ValueError, SyntaxError):
            return []  # the worker will say so
        own: list[Path] = []
        for one in _imports(tree.body):
            if one.package in NOT_BEFORE_A_FORK:
                continue
            if one.package in sys.stdlib_module_names or _is_installed(one.package, self.directory):
                self.found[one] = None
            else:
                own += self.files(one)
        return own

    def files(self, one: Import) -> Iterator[Path]:
        for name in (one.module, *(f"{one.module}.{part}" for part in one.names)):
            stem = self.directory.joinpath(*name.split("."))
            for path in (stem.with_suffix(".py"), stem / "__init__.py"):
                if path.is_file():
                    yield path


def _imports(body: list[ast.stmt]) -> Iterator[Import]:
    for statement in body:
        match statement:
            case ast.Import(names):
                yield from (Import(name.name) for name in names)
            case ast.ImportFrom(module=str(module), names=names, level=0):
                yield Import(module, tuple(name.name for name in names if name.name != "*"))
            case ast.Try():
                yield from _imports(statement.body)


def _is_installed(package: str, directory: Path) -> bool:
    """Found where packages are installed, and not first beside the script."""
    if package == "holdfast":
        return True  # wherever it is, we are in it
    try:
        spec = PathFinder.find_spec(package, [str(directory), *sys.path[1:]])
    except (ImportError, ValueError):
        return False
    places = [spec.origin or "", *(spec.submodule_search_locations or ())] if spec is not None else []
    roots = tuple(f"{sysconfig.get_path(kind)}/" for kind in ("purelib", "platlib"))
    return any(place.startswith(roots) for place in places)
