"""Checkpoints around other checkpoints: what a wrapper changes it says itself, and the rest is the inner ones'."""

from __future__ import annotations

from typing import ClassVar

from holdfast.engine.transfer.checkpointing import NoCheckpoints


class WrappedCheckpoints(NoCheckpoints):
    """`AS_THEY_ARE` are the methods that are handed on, without a call in between: some are asked before each step."""

    AS_THEY_ARE: ClassVar[tuple[str, ...]] = ()

    def __init__(self, inner: NoCheckpoints) -> None:
        self._inner = inner
        vars(self).update({name: getattr(inner, name) for name in self.AS_THEY_ARE})

    @property
    def keeps(self) -> bool:  # type: ignore[override]
        return self._inner.keeps

    @property
    def saving(self) -> bool:  # type: ignore[override]
        return self._inner.saving
