"""A collective that this rank has submitted, until its result is taken."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from holdfast.horovod.common.exceptions import HorovodInternalError
from holdfast.horovod.exchange.matching import Ident
from holdfast.horovod.exchange.work import Submission

POLL_PAUSE_S = 0.2  # who asks less often does something else meanwhile
POLLED_S = 5.0  # who has done nothing but ask for so long is taken to wait


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
    reported: bool = False  # as a stall
    polled_since: float = 0.0
    polled_at: float = -math.inf

    def polled(self, now: float) -> bool:
        """A script asks whether it is done. Whether it does nothing else any more."""
        if now - self.polled_at > POLL_PAUSE_S:
            self.polled_since = now
        self.polled_at = now
        return now - self.polled_since > POLLED_S

    @property
    def row(self) -> str:
        """Of the timeline."""
        return self.ident[1] or f"noname.{self.ident[2]}"
