"""What a saver tells its owner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from holdfast.checkpoint.format.manifest import Manifest
from holdfast.checkpoint.storage.port import Storage


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint that this worker has committed, or has found committed."""

    step: int
    bytes: int
    duration_s: float
    held_s: float
    mine: bool  # committed by this worker


@dataclass(frozen=True)
class SaverNews:
    """What the saver tells its owner, from its own thread."""

    saved: Callable[[Saved, Manifest], None]
    trouble: Callable[[str], None]  # storage did not do it: once for each spell of it
    recovered: Callable[[float], None]  # after so many seconds
    warned: Callable[[str], None] = lambda text: None  # it is not storage's fault
    committing: Callable[[Storage], None] = lambda storage: None  # StorageError if this must not be
