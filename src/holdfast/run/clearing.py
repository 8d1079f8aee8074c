"""Deletes superseded checkpoints, in a thread of its own: it may take long, and no save should wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from holdfast.checkpoint.reading import list_checkpoints, read_manifest
from holdfast.checkpoint.retention import Keep, abandoned, delete_checkpoint, superseded
from holdfast.checkpoint.storage.opening import open_storage
from holdfast.checkpoint.storage.port import Storage
from holdfast.core.errors import StorageError

CLOSE_S = 5.0  # at the end of a script, for what is being deleted


class Clearing:
    """`committed` is called by the thread that has committed a checkpoint. One thread deletes at a time."""

    def __init__(self, uri: str, keep: Keep, warn: Callable[[str], None]) -> None:
        self._uri = uri
        self._keep = keep
        self._warn = warn
        self._changed = threading.Condition()
        self._due: int | None = None  # the step that was committed last
        self._thread: threading.Thread | None = None
        self._metrics_of: dict[int, Mapping[str, float]] = {}  # of the thread that deletes

    def committed(self, step: int) -> None:
        with self._changed:
            self._due = step
            if self._thread is not None:
                return
            self._thread = threading.Thread(target=self._work, name="holdfast-clear", daemon=True)
            try:
                self._thread.start()
            except RuntimeError:  # the interpreter ends, and starts no threads any more
                self._thread = None
        if self._thread is None:
            self._work()

    def close(self) -> None:
        thread = self._thread
        if thread is not None:
            thread.join(CLOSE_S)

    def _work(self) -> None:
        while True:
            with self._changed:
                newest, self._due = self._due, None
                if newest is None:
                    self._thread = None
                    return
            try:
                storage = open_storage(self._uri)
                try:
                    self._clear(storage, newest)
                finally:
                    storage.close()
            except StorageError as error:
                self._warn(f"old checkpoints could not be deleted: {error.message}")

    def _clear(self, storage: Storage, newest: int) -> None:
        """Delete what is superseded, and what was never finished and has two newer ones.

        What is newer than the one just committed supersedes nothing: the run was there once, and did not go on from
        it because it is damaged. It stays until the run has passed it.
        """
        listed = [entry for entry in list_checkpoints(storage) if entry.step <= newest]
        committed = [entry.step for entry in listed if entry.committed]
        if self._keep.best:
            for step in committed:
                if step not in self._metrics_of:
                    self._metrics_of[step] = _metrics(storage, step)
        old = superseded([(step, self._metrics_of.get(step, {})) for step in committed], self._keep)
        before = committed[1] if len(committed) > 1 else 0
        for step in (*old, *(step for step in abandoned(listed) if step < before)):
            delete_checkpoint(storage, step)


def _metrics(storage: Storage, step: int) -> Mapping[str, float]:
    try:
        return read_manifest(storage, step).metrics
    except StorageError:
        return {}
