"""A run as curves over its steps, for TensorBoard. Pure: a projection of the fold (fold.py)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from holdfast.core.spending import CATEGORIES
from holdfast.observe.fold import RunRecord

TAGS_MAX = 256


class Scalar(NamedTuple):
    tag: str
    step: int
    value: float
    t: float


class Scalars:
    """Takes events in order and gives the points that they add. What is missing in one or wrong is passed over."""

    def __init__(self) -> None:
        self._record = RunRecord()
        self._tags: set[str] = set()

    def feed(self, event: Mapping[str, Any]) -> list[Scalar]:
        if not self._record.feed(event):
            return []
        try:
            found = list(self._points(event))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            return []
        return [one for one in found if self._is_known(one.tag)]

    def _is_known(self, tag: str) -> bool:
        if len(self._tags) < TAGS_MAX:
            self._tags.add(tag)
        return tag in self._tags

    def _points(self, event: Mapping[str, Any]) -> Iterator[Scalar]:
        kind, t = event["kind"], float(event["t"])
        if kind in ("progress", "recorded"):
            step = int(event["step"])
            for name, value in (event.get("metrics") or {}).items():
                yield Scalar(str(name), step, float(value), t)
        if kind == "progress":
            yield Scalar("holdfast/samples_per_second", step, float(event.get("samples_per_s") or 0.0), t)
            yield Scalar("holdfast/workers", step, float(event.get("workers") or 0), t)
            yield from self._shares(step, t)
        elif kind == "recovered":
            yield Scalar("holdfast/recovery_seconds", int(event["step"]), float(event["duration_s"]), t)
        elif kind == "checkpoint":
            yield Scalar("holdfast/checkpoint_seconds", int(event["step"]), float(event["duration_s"]), t)
            yield Scalar("holdfast/checkpoint_held_seconds", int(event["step"]), float(event["held_s"]), t)

    def _shares(self, step: int, t: float) -> Iterator[Scalar]:
        if not self._record.time.told:
            return
        spent = self._record.time.run(t)
        if spent.goodput is not None and math.isfinite(spent.goodput):
            yield Scalar("holdfast/goodput", step, spent.goodput, t)
        for category in CATEGORIES:
            if spent.seconds[category]:
                yield Scalar(f"holdfast_time/{category}", step, spent.share(category), t)
