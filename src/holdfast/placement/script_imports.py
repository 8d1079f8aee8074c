"""What a script will import, read from its text without running any of it.

Only installed packages are named: the script's own modules may do anything when they are imported, so they are read
in turn instead, for the packages that they import. Packages look at variables when they are imported: once a file
touches those, or `sys.path`, nothing after it is named.
"""

from __future__ import annotations

import ast
import sys
import sysconfig
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from itertools import chain
from pathlib import Path

FILES_MAX = 200
# What is imported after these may look at what they have set, and would find it unset.
SETTINGS = frozenset(("environ", "environb", "load_dotenv", "putenv", "setenv", "unsetenv"))
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
    """Goes through the files in the order in which Python would, until something is set that an import may look at."""

    directory: Path
    found: dict[Import, None] = field(default_factory=dict)
    seen: set[Path] = field(default_factory=set)
    is_over: bool = False

    def search(self, path: Path) -> list[Import]:
        path = path.resolve()
        if path not in self.seen and len(self.seen) < FILES_MAX:
            self.seen.add(path)
            try:
                self._read(ast.parse(path.read_bytes()).body, set())
            except (OSError, ValueError, SyntaxError, RecursionError):
                pass  # the worker will say so
        return list(self.found)

    def _read(self, body: list[ast.stmt], setters: set[str]) -> None:
        """`setters` are the functions of this file that change settings, when they are called."""
        for statement in body:
            match statement:
                case ast.Import(names):
                    for name in names:
                        self._take(Import(name.name))
                case ast.ImportFrom(module=str(module), names=names, level=0):
                    self._take(Import(module, tuple(name.name for name in names if name.name != "*")))
                case ast.Try():
                    self._read(statement.body, setters)
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    if _mentions(statement, SETTINGS):
                        setters.add(statement.name)
                case _:
                    self.is_over |= _mentions(statement, SETTINGS | setters)
            if self.is_over:
                return

    def _take(self, one: Import) -> None:
        if self.is_over or one.package in NOT_BEFORE_A_FORK:
            return
        if one.package in sys.stdlib_module_names or _is_installed(one.package, self.directory):
            self.found[one] = None
            return
        for path in self.files(one):
            self.search(path)

    def files(self, one: Import) -> Iterator[Path]:
        for name in (one.module, *(f"{one.module}.{part}" for part in one.names)):
            stem = self.directory.joinpath(*name.split("."))
            for path in (stem.with_suffix(".py"), stem / "__init__.py"):
                if path.is_file():
                    yield path


def _mentions(statement: ast.stmt, names: Set[str]) -> bool:
    """Whether what runs with it has one of the names in it; bodies of functions run later."""
    waiting: list[ast.AST] = [statement]
    first = True
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            if name in names or ast.unparse(node) == "sys.path":
                return True
        if first or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            waiting += ast.iter_child_nodes(node)
        first = False
    return False


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
