"""Arguments of Horovod's functions that say on which device to work: taken, and without effect here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TAKEN = {"device_dense", "device_sparse", "device", "ignore_name_scope", "use_locking", "session"}


def check(given: Mapping[str, Any]) -> None:
    """TypeError for a name that Horovod does not have either."""
    if unknown := sorted(given.keys() - TAKEN):
        raise TypeError(f"there is no argument {', '.join(unknown)}")
