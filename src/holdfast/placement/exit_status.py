"""The exit code of a worker's process, where it is not for the script to say: its last state could not be saved, say.

Whoever ends the process asks `code_of`. Where nobody does (`is_obeyed`), whoever wants another code must end it.
"""

from __future__ import annotations

_wanted: int | None = None
is_obeyed = False  # whether this process ends by `code_of`


def want(code: int) -> None:
    global _wanted
    _wanted = code


def obey() -> None:
    global is_obeyed
    is_obeyed = True


def code_of(script: int) -> int:
    """The exit code of a process whose script ended with this one."""
    return script if _wanted is None else _wanted
