"""The same as holdfast.horovod.keras.elastic, under the other name that Horovod has for it."""

from __future__ import annotations

from holdfast.horovod.keras.elastic import (
    CommitStateCallback,
    KerasState,
    ObjectState,
    State,
    UpdateBatchStateCallback,
    UpdateEpochStateCallback,
    run,
)

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "ObjectState",
    "State",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]
