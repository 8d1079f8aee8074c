"""The source of a function that was defined in a notebook's cells, with all that it needs of the session.

What a function refers to is looked for by its names: other functions and classes of the session come with their own
source, what was imported is imported again, small values are written out, and tensors and arrays go as data. Nothing
is serialised as code, so nothing has to be unpickled: the result is a script that a person can read.

A session that keeps no source (`python -i` before 3.13) and a value that is no data are a ConfigError.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import linecache
import math
import symtable
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any

from holdfast.core.errors import ConfigError

WRITTEN_OUT_MAX = 200  # characters of a value that is written into the script; larger ones go as data
_HINT = (
    "make it inside {}, or in a function that it calls; numbers, strings, lists, dicts, tensors and arrays can be sent"
)


@dataclass
class Written:
    """Parts of a script, each in an order in which it can run, and the values that it asks for by name."""

    futures: set[str] = field(default_factory=set)
    imports: dict[str, None] = field(default_factory=dict)
    definitions: list[str] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        futures = [f"from __future__ import {name}" for name in sorted(self.futures)]
        return "\n\n".join(["\n".join([*futures, *self.imports]), *self.definitions])


def written_of(fn: FunctionType) -> Written:
    """The script that defines `fn` as it is in this session."""
    search = _Search(fn.__globals__)
    search.define(fn.__name__, fn, asked_by=fn.__name__)
    return search.written


class _Search:
    def __init__(self, session: dict[str, Any]) -> None:
        self._session = session
        self._done: set[str] = set()
        self.written = Written()

    def need(self, name: str, asked_by: str) -> None:
        if name in self._done or name not in self._session or name.startswith("__"):
            return  # a builtin, or a name that is missing in the session as well
        value = self._session[name]
        if name in vars(builtins) and vars(builtins)[name] is value:
            return
        self._done.add(name)
        if statement := _import_of(name, value):
            self.written.imports[statement] = None
        elif isinstance(value, FunctionType | type):
            self.define(name, value, asked_by)
        else:
            self._take_value(name, value, asked_by)

    def define(self, name: str, value: FunctionType | type, asked_by: str) -> None:
        """Its own source, behind that of what it needs."""
        self._done.add(name)
        own = value.__name__
        if own != name and self._session.get(own) is not value:
            raise _unsent(name, value, asked_by, f"it is defined as {own}, and that is something else by now")
        if own != name:
            self.need(own, asked_by)
            self.written.definitions.append(f"{name} = {own}")
            return
        source = _source_of(value, asked_by)
        if isinstance(value, FunctionType) and inspect.unwrap(value).__code__.co_flags & _ANNOTATIONS:
            self.written.futures.add("annotations")
        for one in _names_in(source):
            if one != own:
                self.need(one, own)
        for statement in _submodules(source, self._session):
            self.written.imports[statement] = None
        self.written.definitions.append(source)

    def _take_value(self, name: str, value: Any, asked_by: str) -> None:
        if _is_plain(value) and len(repr(value)) <= WRITTEN_OUT_MAX:
            self.written.definitions.append(f"{name} = {value!r}")
            return
        from holdfast.state.codec import flatten

        try:
            flatten(value, path=name)
        except ConfigError as error:
            raise _unsent(name, value, asked_by, error.message) from error
        self.written.values[name] = value
        self.written.definitions.append(f"{name} = value({name!r})")


_ANNOTATIONS = __import__("__future__").annotations.compiler_flag


def _unsent(name: str, value: Any, asked_by: str, why: str) -> ConfigError:
    kind = type(value).__name__
    return ConfigError(
        f"{asked_by} uses {name}, a {kind} of this session, which cannot be sent to the workers: {why}",
        hint=_HINT.format(asked_by),
    )


def _is_plain(value: Any) -> bool:
    """Whether Python reads its repr back as the same value."""
    kind = type(value)
    if kind is float:
        return math.isfinite(value)
    if kind in (list, tuple):
        return all(map(_is_plain, value))
    if kind is dict:
        return all(_is_plain(key) and _is_plain(one) for key, one in value.items())
    return value is None or kind in (bool, int, str, bytes)


# ---- where the source is


def _source_of(value: FunctionType | type, asked_by: str) -> str:
    """The statement that defined it, with its decorators."""
    name = value.__name__
    for path in _files_of(value):
        lines = linecache.getlines(path)
        try:
            statements = ast.parse("".join(lines)).body
        except SyntaxError:
            continue
        for node in reversed(statements):
            kinds = (ast.ClassDef,) if isinstance(value, type) else (ast.FunctionDef,)
            if isinstance(node, kinds) and node.name == name:
                first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
                return "".join(lines[first - 1 : node.end_lineno]).rstrip()
    raise ConfigError(
        f"the source of {name}{'' if name == asked_by else f', which {asked_by} uses,'} is not kept by this session",
        hint="put it into a file, and import it from there; a notebook keeps what is defined at the top of a cell",
    )


def _files_of(value: FunctionType | type) -> Iterator[str]:
    """Where it may be defined: the cell of its own code, else, for a class without any, all cells, the newest first."""
    codes = [inspect.unwrap(one).__code__ for one in _functions_of(value)]
    yield from dict.fromkeys(code.co_filename for code in codes)
    if isinstance(value, type):
        yield from reversed([path for path, entry in linecache.cache.items() if len(entry) > 1 and entry[1] is None])


def _functions_of(value: FunctionType | type) -> Iterator[FunctionType]:
    if isinstance(value, FunctionType):
        yield value
        return
    for one in vars(value).values():
        held = getattr(one, "__func__", getattr(one, "fget", one))
        if isinstance(held, FunctionType):
            yield held


# ---- what it needs


def _names_in(source: str) -> list[str]:
    """The global names that a definition refers to, when it runs and when what it defines is called."""
    found: dict[str, None] = {}
    waiting = [symtable.symtable(source, "<definition>", "exec")]
    while waiting:
        table = waiting.pop(0)
        for symbol in table.get_symbols():
            is_top = table.get_type() == "module"
            if (is_top and symbol.is_referenced()) or (not is_top and symbol.is_global()):
                found[symbol.get_name()] = None
        waiting += table.get_children()
    return list(found)


def _import_of(name: str, value: Any) -> str:
    """The statement that binds `name` to the same object in another process; empty: nothing imports it."""
    if isinstance(value, ModuleType):
        module = value.__name__
        if sys.modules.get(module) is not value or module == "__main__":
            return ""
        return f"import {module}" if name == module else f"import {module} as {name}"
    for module, attribute in (*_imported_as(name), _home_of(value)):
        if not module or module == "__main__":
            continue
        with suppress(ImportError, AttributeError):
            if getattr(importlib.import_module(module), attribute) is value:
                return f"from {module} import {attribute}" + (f" as {name}" if attribute != name else "")
    return ""


def _home_of(value: Any) -> tuple[str, str]:
    """Where a function or class says that it is from."""
    module, attribute = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    known = isinstance(module, str) and module in sys.modules and isinstance(attribute, str)
    return (module, attribute) if known and attribute.isidentifier() else ("", "")  # type: ignore[return-value]


def _imported_as(name: str) -> Iterator[tuple[str, str]]:
    """(module, attribute) of the statements `from module import attribute as name` in the session's cells."""
    for path in reversed([path for path, entry in linecache.cache.items() if len(entry) > 1 and entry[1] is None]):
        with suppress(SyntaxError):
            for node in ast.walk(ast.parse("".join(linecache.getlines(path)))):
                if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    yield from ((node.module, one.name) for one in node.names if (one.asname or one.name) == name)


def _submodules(source: str, session: dict[str, Any]) -> Iterator[str]:
    """`import a.b` for what is used as `a.b.c`, where `a` is a module that may not bring `b` along."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = session.get(node.value.id)
            if isinstance(module, ModuleType) and f"{module.__name__}.{node.attr}" in sys.modules:
                yield f"import {module.__name__}.{node.attr}"
