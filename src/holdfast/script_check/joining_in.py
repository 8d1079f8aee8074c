"""How the second process of a check begins with the state of the first, in the way of a worker that joins.

The first writes a snapshot to a file when it has applied a number of steps. The second builds everything as its script
says, looks for the state as it would look for a checkpoint, and waits there for the file. Neither touches the place
that the script names for checkpoints.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from holdfast.checkpoint.settings import CheckpointSettings
from holdfast.core.config import RunConfig
from holdfast.engine.ledger_feed import LedgerFeed
from holdfast.engine.place import WorkerPlace
from holdfast.engine.recovery.rewinding import Rewinding
from holdfast.engine.transfer.checkpointing import NoCheckpoints
from holdfast.membership import messages as m
from holdfast.script_check.notes import JOINER, Task
from holdfast.state.layout import TensorSpec, memory_of, readable, spec_of
from holdfast.state.snapshot import Holder, Snapshot

LOOK_S = 0.02


def write_snapshot(path: Path, snapshot: Snapshot) -> None:
    tensors = [readable(tensor, "a tensor of the state") for tensor in snapshot.tensors]
    head = {"step": snapshot.step, "tree": len(snapshot.tree), "specs": [spec_of(one).to_json() for one in tensors]}
    partial = path.with_suffix(".new")
    with partial.open("wb") as file:
        file.write(json.dumps(head).encode() + b"\n" + snapshot.tree)
        for tensor in tensors:
            file.write(memory_of(tensor))
    partial.replace(path)


def read_snapshot(path: Path, holder: Holder) -> Snapshot:
    """Parameters are received where they live, as by any joiner."""
    with path.open("rb") as file:
        head = json.loads(file.readline())
        tree = file.read(head["tree"])
        specs = [TensorSpec.from_json(spec) for spec in head["specs"]]
        tensors = holder.place(tree, specs)
        for tensor, spec in zip(tensors, specs, strict=True):
            file.readinto(memory_of(tensor, spec))
    return Snapshot(head["step"], tree, tuple(tensors))


class HandedOver(NoCheckpoints):
    """Finds the first process's state, as soon as it is there. Whoever conducts the check ends a wait in vain."""

    def __init__(self, place: CheckedPlace, holder: Holder) -> None:
        self._place = place
        self._path = place.task.snapshot
        self._holder = holder
        self._wanted = False

    def search_at(self, when: float | None) -> None:
        self._wanted = when is not None

    def is_search_due(self, now: float) -> bool:
        return self._wanted

    def search(self) -> m.Restored | None:
        self._wanted = False
        while not self._path.exists():
            time.sleep(LOOK_S)
        with torch.no_grad():
            snapshot = read_snapshot(self._path, self._holder)
        self._holder.restore(snapshot, adopt=True)
        self._place.arrived(snapshot.step)
        return m.Restored(snapshot.step)


class CheckedPlace(WorkerPlace):
    """Where a process of a check belongs: nowhere, as in a run of one, and it keeps no checkpoints."""

    task: Task
    arrived: Callable[[int], None]

    def checkpoints(
        self, config: RunConfig, holder: Any, saving: CheckpointSettings, feed: LedgerFeed, rewinding: Rewinding
    ) -> NoCheckpoints:
        return HandedOver(self, holder) if self.task.role == JOINER else NoCheckpoints()

    def saves(self, checkpoints: NoCheckpoints) -> bool:
        return self.task.role == JOINER
