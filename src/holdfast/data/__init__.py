"""What a shard contains: index arithmetic, seeds, and the fetching of samples. Same bits wherever it happens.

`Stream` and `Mixture` are datasets over files for join, `Lines`, `Tar` and `Tokens` what they read; a `Source` is what
these are. Names are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.data.streams.mixture import Mixture
    from holdfast.data.streams.sources import Lines, Source, Tar, Tokens
    from holdfast.data.streams.stream import Stream

__all__ = ["Lines", "Mixture", "Source", "Stream", "Tar", "Tokens"]

_HOMES = {"Mixture": "mixture", "Stream": "stream"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'holdfast.data' has no attribute {name!r}")
    return getattr(import_module(f"holdfast.data.streams.{_HOMES.get(name, 'sources')}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
