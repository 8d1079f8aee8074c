"""Which checkpoints are kept. Deciding is pure; deleting takes the manifest first, so that nothing half is ever seen.

Only what is committed and superseded goes, and never the newest one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from holdfast.checkpoint.manifest import MANIFEST, directory_of, manifest_name
from holdfast.checkpoint.reading import Listed
from holdfast.checkpoint.storage.port import Storage
from holdfast.core.errors import ConfigError

_HINT = "for example --keep-last 3 --keep-every 1000 --keep-best loss:min"


@dataclass(frozen=True, kw_only=True)
class Keep:
    """What to keep: the newest `last`, every step that `every` divides (0: none), the best by `best` ("loss:min")."""

    last: int = 1
    every: int = 0
    best: str = ""

    def validate(self) -> None:
        if type(self.last) is not int or self.last < 1:
            raise ConfigError(f"the newest {self.last!r} checkpoints cannot be kept: at least one is", hint=_HINT)
        if type(self.every) is not int or self.every < 0:
            raise ConfigError(f"checkpoints of every {self.every!r} steps cannot be kept", hint=_HINT)
        if self.best:
            self.criterion()

    def criterion(self) -> tuple[str, bool]:
        """The metric's name, and whether the largest is the best."""
        metric, separator, which = self.best.rpartition(":")
        if not metric or not separator or which not in ("min", "max"):
            raise ConfigError(f"{self.best!r} does not say which checkpoint is the best", hint=_HINT)
        return metric, which == "max"


def superseded(committed: Sequence[tuple[int, Mapping[str, float]]], keep: Keep) -> list[int]:
    """The steps that may be deleted, oldest first, of all committed ones with their metrics in any order."""
    keep.validate()
    metrics = dict(committed)
    steps = sorted(metrics)
    kept = set(steps[-keep.last :])
    if keep.every:
        kept.update(step for step in steps if step % keep.every == 0)
    if keep.best:
        name, largest = keep.criterion()
        # Of equals the newest; what is not a number is nobody's best.
        scored = [
            (m[name] if largest else -m[name], s) for s, m in metrics.items() if not math.isnan(m.get(name, math.nan))
        ]
        if scored:
            kept.add(max(scored)[1])
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
