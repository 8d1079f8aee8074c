"""Writes a share of a save to storage, and commits the save when all parts of all workers are there.

Owned by the saver's thread. Storage's troubles are raised: whether and when it is tried again is the saver's to decide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from holdfast.checkpoint.format.manifest import MANIFEST_BYTES_MAX, Manifest, directory_of, manifest_name
from holdfast.checkpoint.format.parts import Part, view_of
from holdfast.checkpoint.saving.health import StorageHealth
from holdfast.checkpoint.saving.saved import SaverNews
from holdfast.checkpoint.saving.share import Share
from holdfast.checkpoint.saving.side_by_side import for_each_part
from holdfast.checkpoint.saving.together import write_together
from holdfast.checkpoint.saving.writing import commit
from holdfast.checkpoint.storage.port import Storage


@dataclass(eq=False)
class ShareWriter:
    """`superseded`: a newer snapshot has come, or the saver is closed. `is_saved`: told of every commit, with the
    manifest and whether it is this worker's."""

    told: SaverNews
    health: StorageHealth
    run: str
    config: Mapping[str, Any]
    superseded: Callable[[], bool]
    is_saved: Callable[[Share, Manifest, bool], None]

    def manifest_of(self, save: Share) -> Manifest:
        """As this worker would commit it."""
        manifest = save.manifest = save.manifest or save.describe(self.run, self.config)
        return manifest

    def write(self, storage: Storage, save: Share, parts: Sequence[Part]) -> bool:
        """False: superseded."""
        todo = [part for part in parts if part.number not in save.written]

        def write(part: Part) -> None:
            image = None if self.superseded() else save.image(part)
            if image is not None:
                # While others are on their way: each is hashed by the thread that writes it.
                name = save.files.get(part.number) or save.seal(part, image)
                storage.write(f"{directory_of(save.step)}/{name}", view_of(image))
                save.written.add(part.number)

        for_each_part(write, todo, storage.writers)
        if self.superseded():
            return False
        if todo:
            self.health.well()
        return True

    def write_together(self, storage: Storage, save: Share, *, distrusted: bool) -> bool:
        """All workers write what they can of a state that does not change any more. False: it is not committed."""
        whole = write_together(storage, save, distrusted=distrusted, superseded=self.superseded)
        return whole and self.commit_if_complete(storage, save)

    def write_missing(self, storage: Storage, save: Share) -> bool:
        """What others should have written, as far as this worker holds it. One's own may have been cleared away too."""
        listed = storage.list(directory_of(save.step) + "/")
        parts = [part for part in save.missing(listed) if part.number in save.images or save.leans_for(part)]
        save.written.difference_update(part.number for part in parts)
        return self.write(storage, save, parts)

    def commit_if_complete(self, storage: Storage, save: Share) -> bool:
        listed = storage.list(directory_of(save.step) + "/")
        there = any(stored.name == manifest_name(save.step) for stored in listed)
        if save.missing(listed):
            return False
        manifest = self.manifest_of(save)
        self.told.committing(storage)
        name, data = manifest_name(save.step), manifest.encode()
        mine = not there and storage.create(name, data)
        if not mine and not commit(storage, manifest):
            # Damaged, or of another state: these parts are whole, and they are what the run is now.
            storage.write(name, memoryview(data))
            mine = True
        elif not mine:  # or it is, and the answer was lost
            mine = storage.read(name, MANIFEST_BYTES_MAX) == data
        self.health.well()
        self.is_saved(save, manifest, mine)
        return True
