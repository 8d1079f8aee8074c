"""The names of an integration, loaded when they are first used, and the other project with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from holdfast.core.errors import ConfigError


def load(package: str, homes: Mapping[str, str], name: str, *, of: Sequence[str], needs: str, hint: str) -> Any:
    """What `package.name` is. `homes`: the module of each name.

    ConfigError where one of the packages `of` the other project is not installed. `needs` says what is to be there,
    with {} for the one that is not.
    """
    if name not in homes:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    try:
        home = import_module(f"{package}.{homes[name]}")
    except ModuleNotFoundError as error:
        missing = (error.name or "").split(".")[0]
        if missing not in of:
            raise
        raise ConfigError(
            f"{package}.{name} needs {needs.format(missing)}, and there is no {missing} here", hint=hint
        ) from error
    return getattr(home, name)
