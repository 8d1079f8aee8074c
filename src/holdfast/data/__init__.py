"""What a shard contains: index arithmetic, seeds, and the fetching of samples. Same bits wherever it happens.

`Stream` and `Mixture` are datasets over files for join, `Lines`, `Tar`, `Tokens` and `Parquet` what they read; a
`Source` is what these are. `Live` is for iterables whose samples are new whoever reads them. Names are loaded when they
are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.data.iterables.reader import Live
    from holdfast.data.streams.mixture import Mixture
    from holdfast.data.streams.parquet import Parquet
    from holdfast.data.streams.sources import Lines, Source, Tar, Tokens
    from holdfast.data.streams.stream import Stream

__all__ = ["Lines", "Live", "Mixture", "Parquet", "Source", "Stream", "Tar", "Tokens"]

_HOMES = {
    "Live": "iterables.reader",
    "Mixture": "streams.mixture",
    "Parquet": "streams.parquet",
    "Stream": "streams.stream",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'holdfast.data' has no attribute {name!r}")
    return getattr(import_module(f"holdfast.data.{_HOMES.get(name, 'streams.sources')}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
