"""Deletes superseded checkpoints, in a thread of its own: it may take long, and no save should wait for it.

The same thread writes into the manifest of a checkpoint what the script came to know of its step only afterwards, such
as the validation loss at the end of an epoch. Every worker does, if nobody has, so that the first one's death takes
nothing away; what they write is the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace

from holdfast.checkpoint.format.manifest import manifest_name
from holdfast.checkpoint.restoring.reading import list_checkpoints, read_manifest
from holdfast.checkpoint.saving.retention import Keep, abandoned, delete_checkpoint, superseded
from holdfast.checkpoint.storage.opening import open_storage
from holdfast.checkpoint.storage.port import Storage
from holdfast.core.errors import IntegrityError, NotStored, StorageError

CLOSE_S = 5.0  # at the end of a script, for what is being deleted
NOTES_MAX = 16


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
        self._stored = -1  # the newest step whose manifest is known to be there
        self._notes: dict[int, dict[str, float]] = {}  # by step: what its manifest may lack

    def committed(self, step: int) -> None:
        """This worker has committed one."""
        with self._changed:
            self._due = step
        self._begin()

    def stored(self, step: int) -> None:
        """The manifest of this step is there, whoever wrote it."""
        with self._changed:
            self._stored = step
        self._begin()

    def noted(self, step: int, metrics: Mapping[str, float]) -> None:
        """The script knows this of the state after so many steps."""
        with self._changed:
            self._notes.setdefault(step, {}).update(metrics)
            for old in sorted(self._notes)[:-NOTES_MAX]:
                del self._notes[old]
        self._begin()

    def _is_due(self) -> bool:
        return self._due is not None or any(step <= self._stored for step in self._notes)

    def _begin(self) -> None:
        with self._changed:
            if self._thread is not None or not self._is_due():
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
                if not self._is_due():
                    self._thread = None
                    return
                newest, self._due = self._due, None
                notes = {step: self._notes.pop(step) for step in sorted(self._notes) if step <= self._stored}
            try:
                with closing(open_storage(self._uri)) as storage:
                    for step, note in notes.items():
                        self._add(storage, step, note)
                    if newest is not None:
                        self._clear(storage, newest)
            except StorageError as error:
                self._warn(f"old checkpoints could not be cleared away: {error.message}")

    def _add(self, storage: Storage, step: int, note: Mapping[str, float]) -> None:
        try:
            manifest = read_manifest(storage, step)
        except (NotStored, IntegrityError):
            return  # it was never finished
        known = {name: repr(value) for name, value in manifest.metrics.items()}
        metrics = {**manifest.metrics, **note}
        if any(known.get(name) != repr(value) for name, value in note.items()):
            storage.write(manifest_name(step), memoryview(replace(manifest, metrics=metrics).encode()))
        self._metrics_of[step] = metrics

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
