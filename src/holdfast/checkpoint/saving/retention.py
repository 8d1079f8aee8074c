"""Which checkpoints are kept. Deciding is pure; deleting takes the manifest first, so that nothing half is ever seen.

Only what is committed and superseded goes, and never the newest one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast.checkpoint.format.manifest import MANIFEST, directory_of, manifest_name
from holdfast.checkpoint.restoring.reading import Listed
from holdfast.checkpoint.storage.port import Storage
from holdfast.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Keep:
    """What to keep: the newest `last`, every step that `every` divides (0: none), the best by `best` ("loss:min")."""

    last: int = 1
    every: int = 0
    best: str = ""

    def validate(self) -> None:
        if type(self.last) is not int or self.last < 1:
            said = f"the newest {self.last!r} checkpoints cannot be kept: at least one is"
            raise ConfigError(said, hint="give a whole number of at least 1")
        if type(self.every) is not int or self.every < 0:
            said = f"checkpoints of every {self.every!r} steps cannot be kept"
            raise ConfigError(said, hint="give a number of steps, or 0 for no others")
        if self.best:
            self.criterion()

    def criterion(self) -> tuple[str, bool]:
        """The metric's name, and whether the largest is the best."""
        metric, separator, which = self.best.rpartition(":")
        if not metric or not separator or which not in ("min", "max"):
            said = f"{self.best!r} does not say which checkpoint is the best"
            raise ConfigError(said, hint="name a recorded metric and what is best: loss:min, accuracy:max")
        return metric, which == "max"


def best_of(committed: Sequence[tuple[int, Mapping[str, float]]], keep: Keep) -> int | None:
    """The step whose metrics are the best by `keep.best`; None: none has that metric.

    Of equals the first, which every run has: later ones are there or not, by when they were due. What is not a number
    is nobody's best.
    """
    name, largest = keep.criterion()
    scored = [
        (m[name] if largest else -m[name], -step) for step, m in committed if not math.isnan(m.get(name, math.nan))
    ]
    return -max(scored)[1] if scored else None


def superseded(committed: Sequence[tuple[int, Mapping[str, float]]], keep: Keep) -> list[int]:
    """The steps that may be deleted, oldest first, of all committed ones with their metrics in any order."""
    keep.validate()
    metrics = dict(committed)
    steps = sorted(metrics)
    kept = set(steps[-keep.last :])
    if keep.every:
        kept.update(step for step in steps if step % keep.every == 0)
    if keep.best:
        best = best_of(committed, keep)
        kept.update([best] if best is not None else [])
    return [step for step in steps if step not in kept]


def abandoned(listed: Sequence[Listed]) -> list[int]:
    """Steps that were never committed and never will be, because a newer one was: oldest first."""
    newest = max((entry.step for entry in listed if entry.committed), default=-1)
    return sorted(entry.step for entry in listed if not entry.committed and entry.step < newest)


def delete_checkpoint(storage: Storage, step: int) -> None:
    """The manifest first: what is interrupted here leaves parts that nobody takes for a checkpoint."""
    storage.delete(manifest_name(step))
    for entry in storage.list(f"{directory_of(step)}/"):
        if entry.name != f"{directory_of(step)}/{MANIFEST}":
            storage.delete(entry.name)
