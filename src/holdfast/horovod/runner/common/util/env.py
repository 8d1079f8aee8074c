"""What a script asks before it has called `hvd.init`."""

from __future__ import annotations

from holdfast.horovod.basics import init, rank, size


def get_env_rank_and_size() -> tuple[int, int]:
    """This process's rank, and how many there are. Ranks are dealt when a world forms, so this waits for it."""
    init()
    return rank(), size()
