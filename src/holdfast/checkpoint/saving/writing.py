"""Writing a checkpoint: images of parts, all of them by one writer, and the commit.

The parts first, the manifest last: until it is there, a reader sees no checkpoint, and afterwards a whole one.
"""

from __future__ import annotations

import mmap
import queue
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, TypeAlias

import torch

from holdfast.checkpoint.format.manifest import MANIFEST_BYTES_MAX, Manifest, decode, directory_of, manifest_name
from holdfast.checkpoint.format.parts import PAGE_BYTES, Part, fill, lay_out, seal, tensor_names, view_of
from holdfast.checkpoint.storage.port import Storage, Stored
from holdfast.core.errors import ConfigError, IntegrityError, NotStored, ProtocolError
from holdfast.state.layout import spec_of
from holdfast.state.snapshot import Snapshot

Progress: TypeAlias = Callable[[int, int], None]  # bytes done, bytes in all; called by the thread that waits


def image_buffer(size: int) -> torch.Tensor:
    """Fresh bytes whose address is a multiple of 4096. They live as long as a tensor refers to them."""
    return torch.frombuffer(_pages(size), dtype=torch.uint8)[:size]


def _pages(size: int) -> mmap.mmap:
    pages = max(-(-size // PAGE_BYTES), 1)
    return mmap.mmap(-1, pages * PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


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
    writers = max(1, min(storage.writers, len(layout)))
    images: queue.SimpleQueue[torch.Tensor] = queue.SimpleQueue()
    for _ in range(writers):
        images.put(image_buffer(max(part.size for part in layout)))

    def write(part: Part) -> Stored:
        image = images.get()
        try:
            fill(part, image, snapshot.tensors)
            name = seal(part, image)
            storage.write(f"{directory_of(snapshot.step)}/{name}", view_of(image)[: part.size])
            return Stored(name, part.size)
        finally:
            images.put(image)

    done, total = 0, sum(part.size for part in layout)
    with ThreadPoolExecutor(writers, thread_name_prefix="holdfast-write") as pool:
        futures = [pool.submit(write, part) for part in layout]
        try:
            for future in as_completed(futures):
                done += future.result().size
                if progress:
                    progress(done, total)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return [future.result() for future in futures]


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
