"""Plain values as YAML: as much of it as manifests need, so that nobody needs a package for it. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

# What no reader of YAML takes for anything but these letters.
_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./@-]*")
_MEANS_SOMETHING = ("true", "false", "yes", "no", "on", "off", "null", "y", "n")


def documents(objects: Sequence[Mapping[str, Any]]) -> str:
    return "---\n".join("\n".join(_lines(one)) + "\n" for one in objects)


def _lines(value: Any) -> list[str]:
    """A mapping or a list that is not empty, each line without indentation of its own."""
    found: list[str] = []
    if isinstance(value, Mapping):
        for key, inner in value.items():
            found += _entry(f"{_scalar(key)}:", inner, "  ")
        return found
    for inner in value:
        if isinstance(inner, Mapping | list | tuple) and inner:
            first, *rest = _lines(inner)
            found += [f"- {first}", *(f"  {line}" for line in rest)]
        else:
            found.append(f"- {_scalar(inner)}")
    return found


def _entry(head: str, value: Any, indent: str) -> list[str]:
    if isinstance(value, Mapping | list | tuple) and value:
        return [head, *(indent + line for line in _lines(value))]
    return [f"{head} {_scalar(value)}"]


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _MEANS_SOMETHING:
        return value
    return json.dumps(value)  # JSON's strings, numbers, {} and [] are YAML too
