"""Writing a checkpoint: images of parts, all of them by one writer, and the commit.

The parts first, the manifest last: until it is there, a reader sees no checkpoint, and afterwards a whole one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from holdfast.checkpoint.format.manifest import MANIFEST_BYTES_MAX, Manifest, decode, directory_of, manifest_name
from holdfast.checkpoint.format.parts import Part, fill, lay_out, seal, tensor_names, view_of
from holdfast.checkpoint.saving.side_by_side import Images, Progress, in_threads
from holdfast.checkpoint.storage.port import Storage, Stored
from holdfast.core.errors import ConfigError, IntegrityError, NotStored, ProtocolError
from holdfast.state.layout import spec_of
from holdfast.state.snapshot import Snapshot


def write_state(
    storage: Storage,
    snapshot: Snapshot,
    *,
    created_s: float,
    run: str = "",
    config: Mapping[str, Any] | None = None,
    metrics: Mapping[str, float] | None = None,
    progress: Progress | None = None,
) -> Manifest:
    """All parts of a snapshot, and then its manifest. ConfigError if the step has a checkpoint with other bytes."""
    specs = tuple(spec_of(tensor) for tensor in snapshot.tensors)
    names = tuple(tensor_names(snapshot.tree, len(specs)))
    layout = lay_out(names, specs, snapshot.step)
    stored = _write_parts(storage, snapshot, layout, progress)
    manifest = Manifest(
        step=snapshot.step,
        run=run,
        tree=snapshot.tree,
        names=names,
        specs=specs,
        parts=tuple(stored),
        config=dict(config or {}),
        metrics=dict(metrics or {}),
        created_s=created_s,
    )
    if not commit(storage, manifest):
        raise ConfigError(
            f"{storage.uri} already has a checkpoint of step {snapshot.step}, with another state",
            hint="choose another step, or delete that one first",
        )
    return manifest


def _write_parts(
    storage: Storage, snapshot: Snapshot, layout: Sequence[Part], progress: Progress | None
) -> list[Stored]:
    images = Images(max(part.size for part in layout))

    def write(part: Part) -> Stored:
        with images.one() as image:
            fill(part, image, snapshot.tensors)
            name = seal(part, image)
            storage.write(f"{directory_of(snapshot.step)}/{name}", view_of(image)[: part.size])
        return Stored(name, part.size)

    sized = [(part, part.size) for part in layout]
    return in_threads(write, sized, threads=storage.writers, name="holdfast-write", progress=progress)


def commit(storage: Storage, manifest: Manifest) -> bool:
    """Makes the checkpoint one that readers see. False: the step has one already, and its bytes are others.

    After StorageUnavailable the outcome is unknown; calling again finds it out.
    """
    name = manifest_name(manifest.step)
    if storage.create(name, manifest.encode()):
        return True
    try:
        return manifest.same_state(decode(storage.read(name, MANIFEST_BYTES_MAX)))
    except (IntegrityError, ProtocolError, NotStored):
        return False


def missing_parts(listed: Sequence[Stored], step: int, parts: Sequence[Stored]) -> list[Stored]:
    """Which of these files (names inside the directory) are not in a listing, or have another size there."""
    prefix = f"{directory_of(step)}/"
    there = {(entry.name, entry.size) for entry in listed}
    return [part for part in parts if (prefix + part.name, part.size) not in there]
