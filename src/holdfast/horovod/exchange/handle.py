"""A collective that this rank has submitted, until its result is taken."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from holdfast.horovod.common.exceptions import HorovodInternalError
from holdfast.horovod.exchange.matching import Ident
from holdfast.horovod.exchange.work import Submission


@dataclass(eq=False)
class Handle:
    """Written by the exchange; `done` is set last."""

    ident: Ident
    submission: Submission
    done: bool = False
    error: HorovodInternalError | None = None
    results: list[torch.Tensor] = field(default_factory=list)
    splits: tuple[int, ...] = ()
    began: float = 0.0
    said: bool = False  # that the script waits for it
    reported: bool = False  # as a stall

    @property
    def row(self) -> str:
        """Of the timeline."""
        return self.ident[1] or f"noname.{self.ident[2]}"
