"""The parts of a checkpoint: which bytes of which tensor lie where in which file. Arithmetic on specs, and the images.

A part is a safetensors file of about PART_BYTES that the safetensors library reads too. Its layout is a function of
the tensors' names and specs alone, so every worker knows all parts, whoever writes them. The name of its file vouches
for its header (`part-0003-<digest of the header>.safetensors`), the header for each tensor: whoever has listed a
directory knows which bytes must be there. A part that two workers write has the same name and the same bytes. Where
the workers have agreed on a mark for a save, the name has that too: it tells this save's parts from those of another
one of the same step.

Owns nothing. Bytes that contradict their names are an IntegrityError that says whose they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
import torch
import xxhash

from holdfast.core.errors import IntegrityError, ProtocolError
from holdfast.state.codec import DEPTH_MAX, Tree, pairs_of, unpack_tree
from holdfast.state.layout import TensorSpec, spec_of

FORMAT = "holdfast/1"
PART_BYTES = 64 * 2**20  # of data; large enough for a disk, small enough to be shared among many workers
PIECE_BYTES_MAX = PART_BYTES  # a multiple of PAGE_BYTES and of every dtype's size
SMALL_BYTES = 2**20
PIECES_MAX = 4096  # in one part, so that a header stays small
NAME_CHARACTERS_MAX = 400
NAMES_CHARACTERS_MAX = 16 * 2**20  # of all names together; later tensors have only a number
PAGE_BYTES = 4096
PIECE_ALIGNMENT = 64  # as torch allocates: a tensor is used where it was read
HEADER_BYTES_MAX = 32 * 2**20  # PIECES_MAX names of the longest kind, twice, and what is beside them
_HASH_BYTES = 4 * 2**20
_NO_DIGEST = "0" * 32
_FILE_NAME = re.compile(r"part-(\d{4,9})-([0-9a-f]{32})(?:-([0-9a-f]{16}))?\.safetensors")
_PIECE_SUFFIX = re.compile(r"#\d+\Z")

# What every reader of safetensors knows. Other dtypes are stored as plain bytes; the manifest has the real one.
STORED_AS: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes of one tensor, all or some, at their place in a file."""

    tensor: int
    start: int  # bytes within the tensor's memory
    stop: int
    name: str  # in the file: the tensor's name, or that and `#k`
    offset: int  # within the file
    dtype: str  # as safetensors calls it
    shape: tuple[int, ...]  # as it lies in memory


@dataclass(frozen=True, slots=True)
class Part:
    step: int
    number: int
    pieces: tuple[Piece, ...]
    data_start: int  # a multiple of PAGE_BYTES
    size: int  # of the file

    def gaps(self) -> Iterator[tuple[int, int]]:
        """The zeros between pieces, as (offset, stop) in the file."""
        end = self.data_start
        for piece in self.pieces:
            if piece.offset > end:
                yield end, piece.offset
            end = piece.offset + piece.stop - piece.start


# -- names


def tensor_names(tree: bytes, count: int) -> list[str]:
    """What to call each tensor of a packed tree: the path of its place in it, keys joined by `/`.

    ProtocolError unless the tree holds each of `count` tensors exactly once. Names are unique, no longer than
    NAME_CHARACTERS_MAX, start with no `__` and end in no `#` with a number.
    """
    paths: dict[int, str] = {}
    for number, path in _places(unpack_tree(tree), "", 0):
        if type(number) is not int or not 0 <= number < count or number in paths:
            raise ProtocolError(f"a tree of {count} tensors has tensor {number!r:.40}, or has it twice")
        paths[number] = path
    if len(paths) != count:
        raise ProtocolError(f"a tree has {len(paths)} tensors, and there are {count}")
    names: list[str] = []
    taken: set[str] = set()
    characters = 0
    for number in range(count):
        name = paths[number] or "state"
        if characters > NAMES_CHARACTERS_MAX:
            name = "tensor"
        if name in taken or len(name) > NAME_CHARACTERS_MAX or name.startswith("__") or _PIECE_SUFFIX.search(name):
            name = f"{name[: NAME_CHARACTERS_MAX - 20].lstrip('_')}~{number}"
        while name in taken:
            name += "~"
        taken.add(name)
        names.append(name)
        characters += len(name)
    return names


def _places(tree: Tree, path: str, depth: int) -> Iterator[tuple[Any, str]]:
    """Every tensor's number with its path, which is cut when it gets too long to be of use."""
    if depth > DEPTH_MAX:
        raise ProtocolError(f"a state nested more than {DEPTH_MAX} deep")
    children: Iterator[tuple[Any, Tree]] = iter(())
    if isinstance(tree, list):
        children = iter(enumerate(tree))
    elif isinstance(tree, dict):
        if len(tree) != 1:
            raise ProtocolError(f"not a tagged value: {tree!r:.80}")
        ((tag, body),) = tree.items()
        if tag in ("T", "a"):
            yield body, path
        elif (pairs := pairs_of(tree)) is not None:
            children = _pairs(pairs)
        elif tag == "t":
            if not isinstance(body, list):
                raise ProtocolError(f"not a value of kind {tag!r:.20}: {body!r:.80}")
            children = iter(enumerate(body))
    for key, child in children:
        if isinstance(child, (dict, list)):
            word = str(key)[: NAME_CHARACTERS_MAX + 1].encode("utf-8", "replace").decode()
            inner = f"{path}/{word}" if path else word
            yield from _places(child, inner[: NAME_CHARACTERS_MAX + 1], depth + 1)


def _pairs(body: list[Any]) -> Iterator[tuple[Any, Tree]]:
    for pair in body:
        if not isinstance(pair, list) or len(pair) != 2 or type(pair[0]) not in (str, int, bool):
            raise ProtocolError(f"not an entry of a dict: {pair!r:.80}")
        yield pair[0], pair[1]


# -- the layout


def lay_out(names: Sequence[str], specs: Sequence[TensorSpec], step: int) -> list[Part]:
    """All parts of a state, at least one. The names are those of `tensor_names`."""
    parts: list[Part] = []
    pieces: list[Piece] = []
    end = 0  # of the data of the part under way
    for piece in sorted(_cut(names, specs), key=_is_small):
        length = piece.stop - piece.start
        place = -(-end // PIECE_ALIGNMENT) * PIECE_ALIGNMENT if length else end
        if pieces and (place + length > PART_BYTES or len(pieces) == PIECES_MAX):
            parts.append(_part(step, len(parts), pieces, end))
            pieces, place = [], 0
        pieces.append(_moved(piece, place))
        end = place + length
    if pieces or not parts:
        parts.append(_part(step, len(parts), pieces, end))
    return parts


def _is_small(piece: Piece) -> bool:
    """Small tensors come last, together: between large ones they would have files of their own, each with its price."""
    return piece.stop - piece.start < SMALL_BYTES and not _PIECE_SUFFIX.search(piece.name)


def _cut(names: Sequence[str], specs: Sequence[TensorSpec]) -> Iterator[Piece]:
    for number, (name, spec) in enumerate(zip(names, specs, strict=True)):
        dtype = STORED_AS.get(spec.dtype)
        size, nbytes = spec.dtype.itemsize if dtype else 1, spec.nbytes
        if nbytes <= PIECE_BYTES_MAX:
            shape = tuple(spec.shape[d] for d in spec.order) if spec.order else spec.shape
            yield Piece(number, 0, nbytes, name, 0, dtype or "U8", shape if dtype else (nbytes,))
            continue
        for k, start in enumerate(range(0, nbytes, PIECE_BYTES_MAX)):
            stop = min(start + PIECE_BYTES_MAX, nbytes)
            yield Piece(number, start, stop, f"{name}#{k}", 0, dtype or "U8", ((stop - start) // size,))


def _part(step: int, number: int, pieces: Sequence[Piece], end: int) -> Part:
    """With offsets in the file instead of in its data: the header's length is known before the digests are."""
    draft = Part(step, number, tuple(pieces), 0, end)
    data_start = -(-(8 + len(_header_json(draft, [_NO_DIGEST] * len(pieces)))) // PAGE_BYTES) * PAGE_BYTES
    moved = tuple(_moved(piece, data_start + piece.offset) for piece in pieces)
    return Part(step, number, moved, data_start, data_start + end)


def _moved(piece: Piece, offset: int) -> Piece:
    return Piece(piece.tensor, piece.start, piece.stop, piece.name, offset, piece.dtype, piece.shape)


def _header_json(part: Part, digests: Sequence[str]) -> bytes:
    about = {"format": FORMAT, "step": str(part.step), "part": str(part.number)}
    header: dict[str, Any] = {"__metadata__": about}
    for piece, digest in zip(part.pieces, digests, strict=True):
        about[f"digest:{piece.name}"] = digest
        place = piece.offset - part.data_start
        offsets = [place, place + piece.stop - piece.start]
        header[piece.name] = {"dtype": piece.dtype, "shape": piece.shape, "data_offsets": offsets}
    # safetensors allows no holes: what is between pieces is a tensor too.
    for k, (start, stop) in enumerate(part.gaps()):
        offsets = [start - part.data_start, stop - part.data_start]
        header[f"__pad_{k}"] = {"dtype": "U8", "shape": [stop - start], "data_offsets": offsets}
    return json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()


def header_bytes(part: Part, digests: Sequence[str]) -> bytes:
    """Everything before the data: the length, the JSON, and spaces up to `data_start`."""
    length = part.data_start - 8
    return length.to_bytes(8, "little") + _header_json(part, digests).ljust(length)


def file_name(number: int, header: bytes | memoryview, mark: int = 0) -> str:
    suffix = f"-{mark:016x}" if mark else ""
    return f"part-{number:04d}-{xxhash.xxh3_128_hexdigest(header)}{suffix}.safetensors"


def vouches(name: str, number: int, header: bytes | memoryview) -> bool:
    """Whether a file of this name has this header."""
    return file_name(number, header, mark_of(name)) == name


def mark_of(name: str) -> int:
    """Of the save that a file belongs to; 0 for none."""
    match = _FILE_NAME.fullmatch(name)
    return int(match[3], 16) if match is not None and match[3] else 0


def unmarked(name: str) -> str:
    """What its bytes alone would call it."""
    return _FILE_NAME.sub(r"part-\1-\2.safetensors", name)


def number_of(name: str) -> int | None:
    """Which part a file's name (without its directory) speaks of; None if it is no part's."""
    match = _FILE_NAME.fullmatch(name)
    if match is None or f"{int(match[1]):04d}" != match[1]:
        return None
    return int(match[1])


# -- images: a part's file as it lies in memory


def fill(part: Part, image: memoryview | torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
    """Copies the tensors' memory to its place in the image. The tensors are such as `readable` returns.

    numpy copies a piece with one memcpy and lets go of Python's lock meanwhile. One call for all of it: only for large
    blocks does the C library write past the processor's caches, which takes half the time and leaves them to training.
    """
    target = numpy.frombuffer(view_of(image), numpy.uint8)
    assert len(target) >= part.size, "the image is too small for its part"
    for start, stop in part.gaps():
        target[start:stop] = 0
    for piece in part.pieces:
        memory = flat_bytes(tensors[piece.tensor], spec_of(tensors[piece.tensor])).numpy()
        numpy.copyto(target[piece.offset : piece.offset + piece.stop - piece.start], memory[piece.start : piece.stop])


def seal(part: Part, image: memoryview | torch.Tensor, mark: int = 0) -> str:
    """Writes the header, with the digests of what `fill` has put there, and returns the file's name."""
    view = view_of(image)
    digests = [digest_of(view, piece.offset, piece.stop - piece.start) for piece in part.pieces]
    header = header_bytes(part, digests)
    assert len(header) == part.data_start
    view[: part.data_start] = header
    return file_name(part.number, header, mark)


def digest_of(view: memoryview, offset: int, length: int) -> str:
    if length <= _HASH_BYTES:
        return xxhash.xxh3_128_hexdigest(view[offset : offset + length])
    hasher = xxhash.xxh3_128()
    for start in range(offset, offset + length, _HASH_BYTES):
        hasher.update(view[start : min(start + _HASH_BYTES, offset + length)])
    return hasher.hexdigest()


def flat_bytes(tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """The tensor's own memory as bytes, without a copy."""
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8)  # numpy's have strides that torch takes for no bytes
    physical = tensor.detach().permute(spec.order) if spec.order else tensor.detach()
    assert physical.is_contiguous(), "flat_bytes needs what readable() returned"
    return physical.view(-1).view(torch.uint8)


def view_of(image: memoryview | torch.Tensor) -> memoryview:
    """The bytes of an image, for those who know no tensors."""
    if isinstance(image, memoryview):
        return image
    array: Any = image.numpy()
    return memoryview(array)


# -- what was read


def read_digests(part: Part, name: str, header: memoryview) -> list[str]:
    """The digests in a header that was read, which must be that of this part, and the one its file's name speaks of."""
    if not vouches(name, part.number, header):
        raise IntegrityError(f"{name}: its header is not the one that was written")
    try:
        about = json.loads(bytes(header[8:]))["__metadata__"]
        digests = [about[f"digest:{piece.name}"] for piece in part.pieces]
        if not all(isinstance(digest, str) and len(digest) == 32 for digest in digests):
            raise ValueError("not a digest")
        if header_bytes(part, digests) != header:
            raise ValueError("another layout")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise IntegrityError(f"{name}: its header is not that of part {part.number} of step {part.step}") from error
    return digests


class PartCheck:
    """Compares a part with its digests while it is read, a block at a time and in order.

    IntegrityError if the header is not the one that the file's name speaks of.
    """

    def __init__(self, part: Part, name: str, header: memoryview) -> None:
        self._part = part
        self._name = name
        self._digests = read_digests(part, name, header)
        self._at = 0  # the piece under way
        self._hasher = xxhash.xxh3_128()
        self._found: list[str] = []

    def update(self, start: int, block: memoryview) -> Iterator[tuple[Piece, int, int]]:
        """The bytes of the file from `start` on. Yields (piece, start, stop) for what they have of each piece."""
        stop = start + len(block)
        for gap, gap_stop in self._part.gaps():
            if any(block[max(gap - start, 0) : max(gap_stop - start, 0)]):
                self._found.append(f"{self._name}: the padding at byte {gap} is not zero")
        while self._at < len(self._part.pieces):
            piece = self._part.pieces[self._at]
            piece_stop = piece.offset + piece.stop - piece.start
            first, last = max(piece.offset, start), min(piece_stop, stop)
            if first < last:
                self._hasher.update(block[first - start : last - start])
                yield piece, first, last
            if piece_stop > stop:
                return  # there is more of it to come
            if self._hasher.hexdigest() != self._digests[self._at]:
                self._found.append(f"{self._name}: the bytes of {piece.name} are not those that were written")
            self._hasher.reset()
            self._at += 1

    def damages(self) -> list[str]:
        """A sentence for every piece whose bytes are not those that were written, after the last block."""
        return self._found


def damages(part: Part, name: str, digests: Sequence[str], data: memoryview) -> Iterator[str]:
    """A sentence for every piece whose bytes are not those that were written. `data` begins at `data_start`."""
    for piece, digest in zip(part.pieces, digests, strict=True):
        if digest_of(data, piece.offset - part.data_start, piece.stop - piece.start) != digest:
            yield f"{name}: the bytes of {piece.name} are not those that were written"
    for start, stop in part.gaps():
        if any(data[start - part.data_start : stop - part.data_start]):
            yield f"{name}: the padding at byte {start} is not zero"


def check_image(name: str, image: memoryview | torch.Tensor) -> None:
    """Whether a whole file has the bytes that its name vouches for; IntegrityError that says whose are damaged."""
    view = view_of(image)
    part = _described(name, view)
    digests = read_digests(part, name, view[: part.data_start])
    for sentence in damages(part, name, digests, view[part.data_start :]):
        raise IntegrityError(sentence)


def _described(name: str, view: memoryview) -> Part:
    """The part as its own header describes it. `read_digests` then makes sure that the description is complete."""
    length = int.from_bytes(view[:8], "little") if len(view) >= 8 else 0
    number = number_of(name)
    if number is None or not 0 < length <= min(HEADER_BYTES_MAX, len(view) - 8):
        raise IntegrityError(f"{name}: its header is not the one that was written")
    if not vouches(name, number, view[: 8 + length]):
        raise IntegrityError(f"{name}: its header is not the one that was written")
    try:
        header = json.loads(bytes(view[8 : 8 + length]))
        about = header.pop("__metadata__")
        pieces, size = [], 8 + length
        for key, value in header.items():
            start, stop = (8 + length + int(offset) for offset in value["data_offsets"])
            shape = tuple(int(size) for size in value["shape"])
            if not 8 + length <= start <= stop:
                raise ValueError("not a place in the file")
            size = max(size, stop)
            if not key.startswith("__pad_"):
                pieces.append(Piece(0, 0, stop - start, key, start, str(value["dtype"]), shape))
        part = Part(int(about["step"]), number, tuple(pieces), 8 + length, size)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise IntegrityError(f"{name}: its header is not that of a part of a checkpoint") from error
    if size != len(view):
        raise IntegrityError(f"{name}: it has {len(view)} bytes instead of {size}")
    return part
