"""How the messages of a masked round travel in Flower's records: plain bytes, as one array of a record of their own.

An array, since Flower sends large ones in parts. What a stranger has sent is looked at for its form and its size and
nothing else; the machines of `byzantine.privacy` judge what it says. Imports no torch: clients may be without.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, RecordDict
from numpy.typing import NDArray

RECORD, SAID = "holdfast.masked", "said"
PLAIN = "holdfast.bytes"  # instead of Flower's name for how an array is serialized
SAID_BYTES, CLIENT_BYTES = 4096, 512


def record_of(said: bytes) -> ArrayRecord:
    return ArrayRecord({SAID: Array("uint8", (len(said),), PLAIN, said)})


def said_in(content: RecordDict, bytes_max: int) -> bytes | str:
    """What was said, or a sentence (str) of why that is nothing."""
    record = content.array_records.get(RECORD)
    if record is None:
        return f"it has no record {RECORD!r}"
    if set(record) != {SAID}:
        return f"its record {RECORD!r} has {len(record)} arrays of other names than {SAID!r}"
    array = record[SAID]
    if array.stype != PLAIN:
        return f"what it says is serialized as {array.stype!r:.40}"
    if len(array.data) > bytes_max:
        return f"what it says has {len(array.data)} bytes, and {bytes_max} are the most"
    return array.data


def is_real(array: Any) -> bool:
    """Whether its numbers are masked. Whole ones are not: noise and a limit would make nonsense of a counter."""
    return bool(array.dtype.kind == "f")


def flat(arrays: Mapping[str, NDArray[Any]]) -> NDArray[np.float64]:
    """All that are real, in the order of their names."""
    parts = [arrays[name].astype(np.float64).reshape(-1) for name in in_order(arrays)]
    return np.concatenate(parts) if parts else np.zeros(0)


def in_order(arrays: Mapping[str, Any]) -> list[str]:
    """The names of those that are real."""
    return sorted(name for name, array in arrays.items() if is_real(array))


def words_bytes_max(clients: int) -> int:
    """How much is said beside numbers, where so many clients are spoken of."""
    return SAID_BYTES + CLIENT_BYTES * clients
