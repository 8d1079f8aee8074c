"""What is old: rows and sightings in the order of (last update, id), and the pair below which everything is gone."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from holdfast.tables.rows.port import USES_BITS, Ids, MarkValues

Horizon: TypeAlias = tuple[int, int]  # (update, id): everything at or below is gone
NOTHING: Horizon = (0, 0)
LAST_ID = (1 << 64) - 1


def below(ids: Ids, marks: MarkValues, horizon: Horizon) -> npt.NDArray[np.bool_]:
    updates = marks >> np.uint64(USES_BITS)
    update, last = np.uint64(horizon[0]), np.uint64(horizon[1])
    found: npt.NDArray[np.bool_] = (updates < update) | ((updates == update) & (ids <= last))
    return found


def nth_oldest(ids: Ids, marks: MarkValues, count: int) -> Horizon:
    updates = marks >> np.uint64(USES_BITS)
    threshold = np.partition(updates, count - 1)[count - 1]
    ties = np.sort(ids[updates == threshold])
    return int(threshold), int(ties[count - 1 - int((updates < threshold).sum())])


def pair(given: Any) -> tuple[int, int]:
    one, other = given
    if type(one) is not int or type(other) is not int or not (0 <= one <= LAST_ID and 0 <= other <= LAST_ID):
        raise ValueError(f"{given!r:.50} is no pair of numbers")
    return one, other
