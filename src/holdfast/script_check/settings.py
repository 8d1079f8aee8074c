"""Settings of a model's modules, and the order of what is in extras: entries beside a snapshot's. Owns nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from holdfast.membership.suspecting import EXTRA, VALUE
from holdfast.state.naming import plain_name

_PLAIN = (bool, int, float, str, type(None))
_KEYS_MAX = 12
_OWN = "holdfast."


def settings_of(model: torch.nn.Module, extras: Mapping[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """(name, part, kind, value), as in an Entry."""
    for path, module in model.named_modules():
        whose = f"the module {plain_name(path)}" if path else "the model"
        yield f"the setting training of {whose}", "flags", VALUE, str(module.training)
        if type(module).__module__.startswith("torch.nn."):
            for name, value in module.__dict__.items():
                if not name.startswith("_") and name != "training" and type(value) in _PLAIN:
                    yield f"the setting {name} of {whose}", "flags", VALUE, repr(value)
    for name, extra in extras.items():
        if not name.startswith(_OWN):
            for path, kind in _orders(extra.state_dict(), ()):
                where = f", key {'.'.join(path)}" if path else ""
                yield f"the order of the extra {name!r}{where}", EXTRA + name, VALUE, kind


def _orders(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(value, dict):
        keys = [str(key) for key in value]
        yield path, f"{type(value).__name__} {', '.join(keys[:_KEYS_MAX])}"
        for key, item in value.items():
            yield from _orders(item, (*path, str(key)))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            if isinstance(item, dict):
                yield from _orders(item, (*path, str(index)))
