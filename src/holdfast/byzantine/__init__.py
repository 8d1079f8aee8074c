"""Updates from participants that nobody vouches for: rules that combine them robustly, and attacks to try them with.

`TrimmedMean().aggregate(updates, f=2)`, `parse("nnm+trimmed-mean")`. docs/reference/aggregators.md has the rules with
their conditions and bounds. Names are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.byzantine.rules.before import (
        AdaptiveClipping,
        Bucketing,
        Clipping,
        DistinctUpdates,
        NearestNeighbourMixing,
    )
    from holdfast.byzantine.rules.centres import CenteredClipping, CovarianceFilter, GeometricMedian, Mean
    from holdfast.byzantine.rules.columns import MeaMed, Median, TrimmedMean
    from holdfast.byzantine.rules.momentum import WorkerMomentum
    from holdfast.byzantine.rules.port import Aggregate, Rule
    from holdfast.byzantine.rules.selecting import Bulyan, Krum, MinimumDiameter, MultiKrum
    from holdfast.byzantine.rules.words import parse
    from holdfast.byzantine.updates import Blocks, mapped

_ROOMS = {
    "rules.before": ("AdaptiveClipping", "Bucketing", "Clipping", "DistinctUpdates", "NearestNeighbourMixing"),
    "rules.centres": ("CenteredClipping", "CovarianceFilter", "GeometricMedian", "Mean"),
    "rules.columns": ("MeaMed", "Median", "TrimmedMean"),
    "rules.momentum": ("WorkerMomentum",),
    "rules.port": ("Aggregate", "Rule"),
    "rules.selecting": ("Bulyan", "Krum", "MinimumDiameter", "MultiKrum"),
    "rules.words": ("parse",),
    "updates": ("Blocks", "mapped"),
}
_HOMES = {name: f"holdfast.byzantine.{room}" for room, names in _ROOMS.items() for name in names}

__all__ = [
    "AdaptiveClipping",
    "Aggregate",
    "Blocks",
    "Bucketing",
    "Bulyan",
    "CenteredClipping",
    "Clipping",
    "CovarianceFilter",
    "DistinctUpdates",
    "GeometricMedian",
    "Krum",
    "MeaMed",
    "Mean",
    "Median",
    "MinimumDiameter",
    "MultiKrum",
    "NearestNeighbourMixing",
    "Rule",
    "TrimmedMean",
    "WorkerMomentum",
    "mapped",
    "parse",
]


def __getattr__(name: str) -> Any:
    if name in ("attacks",):
        return import_module("holdfast.byzantine.attacks")
    if name not in _HOMES:
        raise AttributeError(f"module 'holdfast.byzantine' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
