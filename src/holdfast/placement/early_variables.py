"""Environment variables that a module of ours sets when it is imported, for packages that read them later.

A worker that is forked from a process with the script's imports gets an environment of its own, and no module is
imported in it again: so what was set is remembered here, and set there once more. What a person has set stays.
"""

from __future__ import annotations

import os

_set: dict[str, str] = {}


def set_unless_given(name: str, value: str) -> None:
    """At the import of a module, before the package that reads it has begun to compute."""
    _set[name] = value
    os.environ.setdefault(name, value)


def set_again() -> None:
    """In a worker that was just forked."""
    for name, value in _set.items():
        os.environ.setdefault(name, value)
