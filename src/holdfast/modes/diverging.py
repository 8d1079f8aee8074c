"""Whether a step shows that the training goes wrong: a mean that is not finite, a loss far above the usual. Pure.

Every member judges the same numbers, the mean gradient and the mean metrics of a committed step, and has the same
memory of the steps before, which travels with the snapshot; so all come to the same verdict without a word about it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from statistics import median
from typing import Any

LOSS = "loss"  # the metric in which spikes are looked for
REMEMBERED = 32  # losses of applied steps
JUDGED_FROM = 8  # so many must be known before one can be called unusual
IN_A_ROW_MAX = 10  # steps that are skipped


def not_finite(metrics: Mapping[str, float]) -> str:
    """A sentence on the first metric that is not finite; empty: all are."""
    for name, value in metrics.items():
        if not math.isfinite(value):
            return f"the metric {name!r} is {value}"
    return ""


class Losses:
    """The losses of the last applied steps, and how many steps in a row were skipped since.

    `spike`: a loss above so many times the median of those is one; 0: none is.
    """

    def __init__(self, spike: float = 0.0) -> None:
        self._spike = spike
        self._known: deque[float] = deque(maxlen=REMEMBERED)
        self.in_a_row = 0

    def spike(self, metrics: Mapping[str, float]) -> str:
        """A sentence on a loss that is a spike; empty: it is none, or there is too little to compare it with."""
        loss = metrics.get(LOSS)
        if not self._spike or loss is None or len(self._known) < JUDGED_FROM:
            return ""
        usual = median(self._known)
        if usual <= 0 or loss <= self._spike * usual:
            return ""  # of what may be negative nobody can say how many times as much it is
        return f"the loss is {loss:.6g}, {loss / usual:.1f} times the median of the last {len(self._known)} steps"

    def applied(self, metrics: Mapping[str, float], *, skipped: bool) -> None:
        """The script's lines for a step are done. What was skipped is no measure for what comes."""
        if skipped:
            self.in_a_row += 1
            return
        self.in_a_row = 0
        if self._spike and LOSS in metrics and math.isfinite(metrics[LOSS]):
            self._known.append(metrics[LOSS])

    def state(self) -> dict[str, Any]:
        """What a joiner must know: nothing at all where nothing was ever skipped and spikes are not looked for."""
        found: dict[str, Any] = {}
        if self._known:
            found["losses"] = list(self._known)
        if self.in_a_row:
            found["skipped"] = self.in_a_row
        return found

    def load(self, state: Mapping[str, Any]) -> None:
        self._known.clear()
        self._known.extend(map(float, state.get("losses", ())))
        self.in_a_row = int(state.get("skipped", 0))
