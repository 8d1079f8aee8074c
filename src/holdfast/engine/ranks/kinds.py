"""Which worker a process is: one by itself, the first rank of a group, or another one."""

from __future__ import annotations

from holdfast.engine.ranks.following import FollowingWorker
from holdfast.engine.ranks.leading import LeadingWorker
from holdfast.engine.ranks.whole_state import FollowingCheckpoints
from holdfast.engine.worker import Worker
from holdfast.placement.ranks import Ranks


def worker_of(ranks: Ranks) -> type[Worker]:
    if ranks.count == 1:
        return Worker
    return FollowingWorker if ranks.rank else LeadingWorker


def in_its_rank(worker: Worker, checkpoints: FollowingCheckpoints) -> Worker:
    """Ready to speak with the other ranks."""
    if isinstance(worker, LeadingWorker):
        return worker.lead()
    return worker.follow(checkpoints) if isinstance(worker, FollowingWorker) else worker
