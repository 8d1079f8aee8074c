"""Arguments of `join` that had other names once, and what to write instead. They are refused, not understood."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

from holdfast.core.errors import ArgumentError

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

NEW_NAMES = {
    "batch": "batch_size=...",
    "last": "drop_last=True to leave out an epoch's last partial batch, drop_last=False to fill it up",
    "loader_workers": "num_workers=...",
    "prefetch": "prefetch_factor=...",
    "save_every": "checkpoint=holdfast.Checkpoints(uri, every=...), or `holdfast run --save-every`",
    "keep": "checkpoint=holdfast.Checkpoints(uri, keep=...), or `holdfast run --keep`",
    "numerics": "`holdfast run --numerics warn`",
}


def tells_new_names(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """The same function; whoever calls it with an old name is told the new one."""

    @wraps(function)
    def told(*arguments: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        for name, instead in NEW_NAMES.items():
            if name in options:
                raise ArgumentError(f"{function.__name__} has no argument {name}", hint=f"write {instead}")
        return function(*arguments, **options)

    return told
