"""Reading checkpoints: what there is, whether it is what was written, and the newest that is.

Every byte that is returned was checked against its digest, and every part against the file name that the manifest
has for it. Parts are read by several threads, each of which checks what it has read while the others read on.
Bytes go straight to where the tensors are: a part that ends a large tensor follows its other parts in memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy
import torch

from holdfast.checkpoint.format.manifest import (
    MANIFEST,
    MANIFEST_BYTES_MAX,
    Manifest,
    decode,
    directory_of,
    manifest_name,
    step_of,
)
from holdfast.checkpoint.format.parts import (
    Part,
    PartCheck,
    Piece,
    damages,
    flat_bytes,
    number_of,
    read_digests,
    view_of,
)
from holdfast.checkpoint.saving.side_by_side import Images, Progress, image_buffer, in_threads
from holdfast.checkpoint.storage.port import Storage, Stored
from holdfast.core.errors import IntegrityError, NotStored, ProtocolError
from holdfast.state.layout import TensorSpec
from holdfast.state.snapshot import Snapshot

TensorPlacement: TypeAlias = Callable[
    [bytes, Sequence[TensorSpec]], Sequence[torch.Tensor]
]  # (tree, specs): where tensors go
READERS_MIN = 4  # reading and checking overlap; with more they are in each other's way
READERS_ANEW_MIN = 8  # and making pages, which takes longest
READERS_MAX = 16


@dataclass(frozen=True, slots=True)
class Listed:
    step: int
    committed: bool
    bytes: int
    parts: int


def list_checkpoints(storage: Storage) -> list[Listed]:
    """Newest first, committed or not."""
    found: dict[int, list[Stored]] = {}
    for entry in storage.list("checkpoint-"):
        step = step_of(entry.name)
        if step is not None:
            found.setdefault(step, []).append(entry)
    listed = []
    for step in sorted(found, reverse=True):
        prefix = f"{directory_of(step)}/"
        names = [entry.name.removeprefix(prefix) for entry in found[step]]
        parts = sum(number_of(name) is not None for name in names)
        listed.append(Listed(step, MANIFEST in names, sum(entry.size for entry in found[step]), parts))
    return listed


def read_manifest(storage: Storage, step: int) -> Manifest:
    """NotStored if that step was not committed; IntegrityError if its manifest is not what was written."""
    name = manifest_name(step)
    data = storage.read(name, MANIFEST_BYTES_MAX)
    try:
        manifest = decode(data)
    except (IntegrityError, ProtocolError) as error:
        raise IntegrityError(f"{name}: {error.message}") from error
    if manifest.step != step:
        raise IntegrityError(f"{name}: it is the manifest of step {manifest.step}")
    return manifest


def read_tensors(
    storage: Storage, manifest: Manifest, *, place: TensorPlacement | None = None, progress: Progress | None = None
) -> list[torch.Tensor]:
    """All tensors, digests checked; IntegrityError (or NotStored) that names the first damage found.

    With `place`, they are put where it says, which takes some megabytes beside that; what is there is undefined if this
    raises. Otherwise they are views of the memory that the parts were read to.
    """
    for sentence in _absent(storage, manifest).values():
        raise IntegrityError(sentence)
    if place is None:
        arena = _Arena(manifest)
        _for_each_part(storage, manifest, progress, arena.read, readers_min=READERS_ANEW_MIN)
        return arena.tensors()
    targets = list(place(manifest.tree, manifest.specs))
    _read_placed(storage, manifest, dict(enumerate(targets)), progress)
    return targets


def read_selected(
    storage: Storage, manifest: Manifest, numbers: Iterable[int], *, progress: Progress | None = None
) -> dict[int, torch.Tensor]:
    """Some of the tensors, each in memory of its own; only the parts that have them are read."""
    for sentence in _absent(storage, manifest).values():
        raise IntegrityError(sentence)
    targets = {}
    for number in numbers:
        spec = manifest.specs[number]
        targets[number] = _shaped(torch.empty(spec.nbytes, dtype=torch.uint8), spec)
    _read_placed(storage, manifest, targets, progress)
    return targets


def _read_placed(
    storage: Storage, manifest: Manifest, targets: Mapping[int, torch.Tensor], progress: Progress | None
) -> None:
    flat = {number: flat_bytes(tensor, manifest.specs[number]).numpy() for number, tensor in targets.items()}
    scratch = _room_for_blocks(storage, manifest)

    def put(piece: Piece, start: int, data: torch.Tensor) -> None:
        if piece.tensor in flat:
            # Not torch: each of these threads would have threads of its own to copy with.
            numpy.copyto(flat[piece.tensor][start : start + len(data)], data.numpy())

    def read(storage: Storage, part: Part, stored: Stored) -> None:
        with scratch.one() as image:
            for sentence in _read_in_blocks(storage, manifest, part, stored, image, put):
                raise IntegrityError(sentence)

    wanted = {part.number for part in manifest.layout if any(piece.tensor in flat for piece in part.pieces)}
    _for_each_part(storage, manifest, progress, read, wanted)


def read_snapshot(
    storage: Storage, step: int, *, place: TensorPlacement | None = None, progress: Progress | None = None
) -> tuple[Manifest, Snapshot]:
    manifest = read_manifest(storage, step)
    tensors = read_tensors(storage, manifest, place=place, progress=progress)
    return manifest, Snapshot(manifest.step, manifest.tree, tuple(tensors))


def newest_valid(
    storage: Storage,
    *,
    warn: Callable[[str], None],
    place: TensorPlacement | None = None,
    leave_out: Collection[int] = (),
) -> tuple[Manifest, Snapshot] | None:
    """The newest checkpoint that verifies. What does not is named through `warn`, and the next older one is tried.

    None if nothing was ever committed; IntegrityError if something was, and none of it verifies.
    """
    steps = [listed.step for listed in list_checkpoints(storage) if listed.committed and listed.step not in leave_out]
    for step in steps:
        try:
            return read_snapshot(storage, step, place=place)
        except (IntegrityError, ProtocolError, NotStored) as error:
            warn(f"the checkpoint of step {step} cannot be used: {error.message}")
    if steps:
        raise IntegrityError(
            f"none of the {len(steps)} checkpoints in {storage.uri} is what was written",
            hint="`holdfast checkpoint verify --all URI` names everything that is damaged",
        )
    return None


def verify(storage: Storage, step: int, progress: Progress | None = None) -> list[str]:
    """A sentence for everything that is not as it was written; empty if all is. Does not stop at the first."""
    try:
        manifest = read_manifest(storage, step)
    except (IntegrityError, ProtocolError, NotStored) as error:
        return [error.message]
    absent = _absent(storage, manifest)
    found = list(absent.values())
    scratch = _room_for_blocks(storage, manifest)
    lock = threading.Lock()

    def read(storage: Storage, part: Part, stored: Stored) -> None:
        if stored.name in absent:
            return
        try:
            with scratch.one() as image:
                sentences = list(_read_in_blocks(storage, manifest, part, stored, image))
        except (IntegrityError, NotStored) as error:
            sentences = [error.message]
        with lock:
            found.extend(sentences)

    _for_each_part(storage, manifest, progress, read)
    return sorted(found)


def _absent(storage: Storage, manifest: Manifest) -> dict[str, str]:
    """What a listing already shows: a sentence for each such part. Nothing is allocated for what is not there."""
    sizes = {entry.name: entry.size for entry in storage.list(f"{directory_of(manifest.step)}/")}
    sentences = {}
    for stored in manifest.parts:
        path = manifest.path(stored)
        if path not in sizes:
            sentences[stored.name] = f"{path}: it is missing"
        elif sizes[path] != stored.size:
            sentences[stored.name] = f"{path}: it has {sizes[path]} bytes instead of {stored.size}"
    return sentences


_ReadPart: TypeAlias = Callable[[Storage, Part, Stored], None]
_Put: TypeAlias = Callable[[Piece, int, torch.Tensor], None]


def _for_each_part(
    storage: Storage,
    manifest: Manifest,
    progress: Progress | None,
    read: _ReadPart,
    wanted: Collection[int] | None = None,
    *,
    readers_min: int = READERS_MIN,
) -> None:
    pairs = zip(manifest.layout, manifest.parts, strict=True)
    chosen = [(part, stored) for part, stored in pairs if wanted is None or part.number in wanted]
    readers = min(max(storage.writers, readers_min), READERS_MAX)
    sized = [(pair, pair[1].size) for pair in chosen]
    in_threads(lambda pair: read(storage, *pair), sized, threads=readers, name="holdfast-read", progress=progress)


def _read_in_blocks(
    storage: Storage, manifest: Manifest, part: Part, stored: Stored, image: torch.Tensor, put: _Put | None = None
) -> list[str]:
    """Reads a part's file, a block at a time; returns what is damaged in it.

    A block is hashed and handed on while it is in the cache. `put` gets the piece, the place in its tensor, the bytes.
    """
    path = manifest.path(stored)
    view = view_of(image)
    end = min(part.size, part.data_start + storage.block_bytes)
    storage.read_into(path, view[:end])
    try:
        check = PartCheck(part, stored.name, view[: part.data_start])
    except IntegrityError as error:
        return [_with_path(path, error.message)]
    start = data = part.data_start
    while True:
        for piece, offset, stop in check.update(start, view[data : data + end - start]):
            if put is not None:
                put(piece, piece.start + offset - piece.offset, image[data + offset - start : data + stop - start])
        if end == part.size:
            return [_with_path(path, sentence) for sentence in check.damages()]
        start, data, end = end, 0, min(part.size, end + storage.block_bytes)
        storage.read_into(path, view[: end - start], start)


def _with_path(path: str, sentence: str) -> str:
    """A sentence that begins with the whole path instead of the file's name."""
    return path.rpartition("/")[0] + "/" + sentence


def _room_for_blocks(storage: Storage, manifest: Manifest) -> Images:
    return Images(max(part.data_start + storage.block_bytes for part in manifest.layout))


class _Arena:
    """Memory that parts are read to and tensors are then views of. A part that continues a tensor follows the last."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._blocks: list[torch.Tensor] = []
        self._places: list[tuple[int, int]] = []  # of each part's data: block, offset
        sizes: list[int] = []
        for part in manifest.layout:
            if part.pieces and part.pieces[0].start:
                # The parts before it have nothing but whole pieces of the same tensor: their ends are page-aligned.
                self._places.append((len(sizes) - 1, sizes[-1]))
                sizes[-1] += part.size - part.data_start
            else:
                self._places.append((len(sizes), part.data_start))
                sizes.append(part.size)
        self._blocks = [image_buffer(size) for size in sizes]

    def read(self, storage: Storage, part: Part, stored: Stored) -> None:
        name = self._manifest.path(stored)
        index, offset = self._places[part.number]
        memory = view_of(self._blocks[index])
        data = memory[offset : offset + part.size - part.data_start]
        if part.pieces and part.pieces[0].start:
            header = view_of(image_buffer(part.data_start))
            storage.read_into(name, header)
            storage.read_into(name, data, part.data_start)
        else:
            header = memory[: part.data_start]
            storage.read_into(name, memory[: part.size])
        try:
            for sentence in damages(part, stored.name, read_digests(part, stored.name, header), data):
                raise IntegrityError(sentence)
        except IntegrityError as error:
            raise IntegrityError(_with_path(name, error.message)) from error

    def tensors(self) -> list[torch.Tensor]:
        tensors: dict[int, torch.Tensor] = {}
        for part in self._manifest.layout:
            index, offset = self._places[part.number]
            for piece in part.pieces:
                if piece.start == 0:
                    spec = self._manifest.specs[piece.tensor]
                    place = offset + piece.offset - part.data_start
                    tensors[piece.tensor] = _shaped(self._blocks[index][place : place + spec.nbytes], spec)
        return [tensors[number] for number in range(len(tensors))]


def _shaped(memory: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    order = spec.order or tuple(range(len(spec.shape)))
    if not spec.nbytes:
        return torch.empty(spec.shape, dtype=spec.dtype)
    inverse = [order.index(d) for d in range(len(order))]
    return memory.view(spec.dtype).view([spec.shape[d] for d in order]).permute(inverse)
