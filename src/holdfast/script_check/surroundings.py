"""What a script keeps beside model, optimizer and extras: variables, attributes of its own objects, generators.

Nothing of this must be the same in two processes; it is looked at to say what makes tensors differ that must be. Names
that are there before the first shard count: later ones are a loop's own. Owns nothing but that first look.
"""

from __future__ import annotations

import itertools
import random
import sys
import sysconfig
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import BuiltinFunctionType, FrameType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy
import torch
import xxhash

import holdfast
from holdfast.script_check.notes import Words
from holdfast.state.layout import memory_of, readable
from holdfast.state.local import local

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_CODE = (type, FunctionType, BuiltinFunctionType, MethodType)
_TEXT_MAX = 40
_ITEMS_MAX = 1000
_ELEMENTS_MAX = 1 << 20
_THINGS_MAX = 2000
_DEPTH_MAX = 3
_ELSEWHERE = tuple(
    {str(Path(holdfast.__file__).parent), *(sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib"))}
)


class Surroundings:
    """Belongs to the thread of the user's loop. `known`: what travels anyway, or is the same everywhere."""

    def __init__(self, model: torch.nn.Module, known: Iterable[Any]) -> None:
        self._model = model
        self._known = {id(one) for one in (model, *known)}
        self._names: frozenset[str] | None = None

    def look(self) -> Words:
        found: Words = {}
        for name, value in itertools.islice(self._things(), _THINGS_MAX):
            text = _text(value)
            if text is not None and (self._names is None or name in self._names):
                found[name] = text
        if self._names is None:
            self._names = frozenset(found)
        return found

    def _things(self) -> Iterator[tuple[str, Any]]:
        """(name, value) of everything that the script keeps, down to plain values."""
        seen: set[int] = set()
        for prefix, module in self._model.named_modules():
            if not type(module).__module__.startswith("torch."):
                whose = f"the module {prefix}" if prefix else "the model"
                for key, value in module.__dict__.items():
                    if not key.startswith("_") and key != "training":
                        yield from self._walk(f"the attribute {key} of {whose}", value, seen, 1)
        frame: FrameType | None = sys._getframe()
        while frame is not None:
            code = frame.f_code
            if _is_the_users(code.co_filename):
                top = code.co_name == "<module>"
                for key, value in list(frame.f_locals.items()):
                    name = f"the global variable {key}" if top else f"the variable {key} of {code.co_name}()"
                    if not key.startswith("__"):
                        yield from self._walk(name, value, seen, 0)
                if not top:
                    yield from self._globals(frame.f_globals, seen)
            frame = frame.f_back

    def _globals(self, values: Mapping[str, Any], seen: set[int]) -> Iterator[tuple[str, Any]]:
        if id(values) in seen:
            return
        seen.add(id(values))
        for key, value in list(values.items()):
            if not key.startswith("__"):
                yield from self._walk(f"the global variable {key}", value, seen, 0)

    def _walk(self, name: str, value: Any, seen: set[int], depth: int) -> Iterator[tuple[str, Any]]:
        if id(value) in self._known:
            return
        if isinstance(value, ModuleType):
            if not depth and _is_the_users(getattr(value, "__file__", None) or "<") and id(value) not in seen:
                seen.add(id(value))
                yield from self._globals(value.__dict__, seen)
            return
        if _is_told(value):
            yield name, value
            return
        if isinstance(value, _CODE) or depth >= _DEPTH_MAX or id(value) in seen:
            return
        seen.add(id(value))
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict) and not type(value).__module__.startswith(("torch.optim", "holdfast")):
            for key, item in list(attributes.items()):
                yield from self._walk(f"the attribute {key} of {name.removeprefix('the ')}", item, seen, depth + 1)


def generator_states() -> str:
    """A digest of the process-wide generators'."""
    hasher: Any = xxhash.xxh3_64()
    hasher.update(torch.default_generator.get_state().numpy().tobytes())
    hasher.update(repr(random.getstate()).encode())
    hasher.update(repr(numpy.random.get_state()[1:]).encode())  # type: ignore[index]
    return str(hasher.hexdigest())


def changes(before: Words, after: Words) -> list[str]:
    """`the global variable count (0, then 8)`"""
    return [
        f"{name} ({value}, then {after[name]})" for name, value in before.items() if after.get(name, value) != value
    ]


def _is_the_users(file: str) -> bool:
    return not file.startswith(("<", *_ELSEWHERE)) and "site-packages" not in file


def _is_told(value: Any) -> bool:
    generators = (torch.Generator, random.Random, numpy.random.Generator, numpy.random.RandomState)
    if isinstance(value, (*_PLAIN, torch.Tensor, numpy.ndarray, numpy.generic, itertools.count, *generators)):
        return True
    return isinstance(value, list | tuple | set | dict | deque)


def _text(value: Any) -> str | None:
    """The value if it is short, else a digest; None: it is nothing that two processes could compare."""
    try:
        return _short(_spelled(value))
    except (RuntimeError, TypeError, ValueError, holdfast.HoldfastError):
        return None


def _spelled(value: Any) -> str:
    if isinstance(value, (*_PLAIN, numpy.generic, itertools.count)):
        return repr(value)
    if isinstance(value, torch.Tensor):
        if value.numel() > _ELEMENTS_MAX:
            raise ValueError("too large to be looked at every step")
        if value.numel() == 1:
            return str(value.item())
        return f"{tuple(value.shape)} {xxhash.xxh3_64_hexdigest(memory_of(readable(local(value), 'a tensor')))[:8]}"
    if isinstance(value, numpy.ndarray):
        if value.size > _ELEMENTS_MAX or value.dtype.hasobject:
            raise ValueError("too large to be looked at every step")
        return f"{value.shape} {xxhash.xxh3_64_hexdigest(value.tobytes())[:8]}"
    if isinstance(value, torch.Generator):
        return f"state {xxhash.xxh3_64_hexdigest(value.get_state().numpy().tobytes())[:8]}"
    if isinstance(value, random.Random):
        return f"state {xxhash.xxh3_64_hexdigest(repr(value.getstate()).encode())[:8]}"
    if isinstance(value, numpy.random.Generator):
        return f"state {xxhash.xxh3_64_hexdigest(repr(value.bit_generator.state).encode())[:8]}"
    if isinstance(value, numpy.random.RandomState):
        return f"state {xxhash.xxh3_64_hexdigest(repr(value.get_state()).encode())[:8]}"
    if not isinstance(value, list | tuple | set | frozenset | dict | deque):
        raise TypeError("to go through anything else may change it: an iterator, a loader")
    if len(value) > _ITEMS_MAX:
        raise ValueError("too long to be looked at every step")
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_spelled(key)}: {_spelled(item)}" for key, item in value.items()) + "}"
    return "[" + ", ".join(map(_spelled, value)) + "]"


def _short(text: str) -> str:
    return text if len(text) <= _TEXT_MAX else f"{text[:_TEXT_MAX]}… {xxhash.xxh3_64_hexdigest(text.encode())[:8]}"
