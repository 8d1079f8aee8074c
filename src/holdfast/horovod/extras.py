"""Frameworks that are not part of every installation: one sentence where one is missing."""

from __future__ import annotations

import importlib.util

from holdfast.core.errors import ConfigError


def need(package: str, by: str) -> None:
    """ConfigError if the package cannot be imported. It is not imported here."""
    if importlib.util.find_spec(package) is None:
        raise ConfigError(
            f"{by} needs {package}, which is not installed here", hint="pip install 'holdfast[tensorflow]'"
        )
