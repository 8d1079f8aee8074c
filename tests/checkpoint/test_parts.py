"""The layout has every byte of every tensor exactly once; the files are safetensors; a name vouches for its bytes."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load

from holdfast.checkpoint.format.parts import (
    NAME_CHARACTERS_MAX,
    PAGE_BYTES,
    PART_BYTES,
    PIECE_ALIGNMENT,
    PIECE_BYTES_MAX,
    PIECES_MAX,
    SMALL_BYTES,
    STORED_AS,
    Part,
    check_image,
    fill,
    lay_out,
    number_of,
    seal,
    tensor_names,
    view_of,
)
from holdfast.checkpoint.saving.side_by_side import image_buffer
from holdfast.core.errors import IntegrityError, ProtocolError
from holdfast.state.codec import flatten, pack_tree
from holdfast.state.layout import DTYPES, TensorSpec, memory_of, spec_of

from .conftest import every_kind, snapshot_of

dtypes = st.sampled_from(sorted(DTYPES.items())).map(lambda item: item[1])
small_shapes = st.lists(st.integers(0, 40), max_size=4).map(tuple)
large_shapes = st.tuples(st.integers(1, 400), st.integers(1, 2**20))
specs = st.builds(TensorSpec, dtypes, st.one_of(small_shapes, large_shapes))


def names_of(count: int) -> list[str]:
    return [f"tensor/{number}" for number in range(count)]


@given(st.lists(specs, max_size=40), st.integers(0, 10**12 - 1))
def test_every_byte_is_there_once(described: list[TensorSpec], step: int) -> None:
    layout = lay_out(names_of(len(described)), described, step)
    assert layout == lay_out(names_of(len(described)), described, step), "the same on every worker"
    assert [part.number for part in layout] == list(range(len(layout))) and layout
    ends = [0] * len(described)
    seen: list[int] = []
    for part in layout:
        end = part.data_start
        assert part.data_start % PAGE_BYTES == 0 and part.size - part.data_start <= PART_BYTES
        assert len(part.pieces) <= PIECES_MAX
        for piece in part.pieces:
            length = piece.stop - piece.start
            assert ends[piece.tensor] == piece.start, "pieces of a tensor come in order, without a hole"
            ends[piece.tensor] = piece.stop
            assert 0 <= piece.offset - end < PIECE_ALIGNMENT, "no piece lies on another"
            assert not length or piece.offset % PIECE_ALIGNMENT == 0
            assert length <= PIECE_BYTES_MAX and piece.start % PAGE_BYTES == 0
            assert length % (described[piece.tensor].dtype.itemsize) == 0
            end = piece.offset + length
            if not piece.start:
                seen.append(piece.tensor)
        assert end == part.size, "the file ends with its data"
    assert ends == [spec.nbytes for spec in described]
    large = [number for number, spec in enumerate(described) if spec.nbytes >= SMALL_BYTES]
    small = [number for number, spec in enumerate(described) if spec.nbytes < SMALL_BYTES]
    assert seen == [*large, *small], "in the order of their numbers, small ones together at the end"


def test_parts_are_bounded_in_pieces_too() -> None:
    described = [TensorSpec(torch.float32, ())] * (2 * PIECES_MAX + 1)
    assert [len(part.pieces) for part in lay_out(names_of(len(described)), described, 0)] == [PIECES_MAX, PIECES_MAX, 1]


def test_a_state_without_tensors_has_one_part() -> None:
    (part,) = lay_out([], [], 3)
    image = image_buffer(part.size)
    name = seal(part, image)
    assert load(bytes(view_of(image))) == {}
    check_image(name, image)


def images_of(state: Any, step: int = 5) -> list[tuple[Part, str, bytearray]]:
    snapshot = snapshot_of(state, step)
    described = [spec_of(tensor) for tensor in snapshot.tensors]
    images = []
    for part in lay_out(tensor_names(snapshot.tree, len(described)), described, step):
        image = bytearray(b"\xa5" * part.size)  # whatever was there before
        fill(part, memoryview(image), snapshot.tensors)
        images.append((part, seal(part, memoryview(image)), image))
    return images


@pytest.mark.usefixtures("small_parts")
def test_the_library_reads_every_part() -> None:
    state = every_kind()
    snapshot = snapshot_of(state, 5)
    names = tensor_names(snapshot.tree, len(snapshot.tensors))
    read: dict[str, torch.Tensor] = {}
    images = images_of(state)
    assert len(images) > 5
    for part, name, image in images:
        assert number_of(name) == part.number
        check_image(name, memoryview(image))
        tensors = load(bytes(image))
        assert all(not tensor.any() for key, tensor in tensors.items() if key.startswith("__pad_"))
        read |= {key: tensor for key, tensor in tensors.items() if not key.startswith("__pad_")}
    for name, tensor in zip(names, snapshot.tensors, strict=True):
        spec = spec_of(tensor)
        pieces = [read.pop(name)] if name in read else []
        while f"{name}#{len(pieces)}" in read:
            pieces.append(read.pop(f"{name}#{len(pieces)}"))
        assert b"".join(bytes(memory_of(piece)) for piece in pieces) == bytes(memory_of(tensor, spec)), name
        if spec.dtype in STORED_AS and len(pieces) == 1:
            assert pieces[0].dtype == spec.dtype
            order = spec.order or range(len(spec.shape))
            assert tuple(pieces[0].shape) == tuple(spec.shape[d] for d in order)
        else:
            assert pieces[0].ndim == 1
    assert not read


def test_two_workers_write_the_same_file() -> None:
    assert [(name, image) for _, name, image in images_of(every_kind())] == [
        (name, image) for _, name, image in images_of(every_kind())
    ]
    assert {name for _, name, _ in images_of(every_kind(), 5)}.isdisjoint(
        name for _, name, _ in images_of(every_kind(), 6)
    ), "the step is in the header"


@pytest.mark.parametrize("bit", range(8))
def test_every_flipped_byte_of_a_file_is_found(bit: int) -> None:
    ((part, name, image),) = images_of({"a": torch.arange(5.0), "bee": torch.ones(3, dtype=torch.bool)})
    said = set()
    header_end = image.index(b"    ")
    for position in [*range(header_end + 3), part.data_start - 1, *range(part.data_start, part.size)]:
        image[position] ^= 1 << bit
        with pytest.raises(IntegrityError) as raised:
            check_image(name, memoryview(image))
        image[position] ^= 1 << bit
        assert name in raised.value.message
        if position >= part.data_start:
            said.add(raised.value.message.removeprefix(f"{name}: "))
        else:
            assert "header" in raised.value.message
    assert said == {
        "the bytes of a are not those that were written",
        f"the padding at byte {part.data_start + 20} is not zero",
        "the bytes of bee are not those that were written",
    }
    check_image(name, memoryview(image))


@given(st.data())
def test_a_cut_file_is_found(data: st.DataObject) -> None:
    ((_, name, image),) = images_of({"a": torch.arange(100.0)})
    length = data.draw(st.integers(0, len(image) - 1))
    with pytest.raises(IntegrityError, match=name):
        check_image(name, memoryview(image)[:length])
    with pytest.raises(IntegrityError, match=name):
        check_image(name, memoryview(image + bytes(1 + length)))


@given(st.text(max_size=80), st.binary(max_size=200))
def test_no_bytes_are_taken_for_a_part(name: str, data: bytes) -> None:
    with pytest.raises(IntegrityError):
        check_image(name, memoryview(bytearray(data)))


# -- names

keys = st.one_of(
    st.text(max_size=8), st.integers(-3, 3), st.sampled_from(["a", "a/b", "a#0", "__pad_0", "__metadata__"])
)
leaves = st.sampled_from([torch.zeros(1), 1, None, "text", 2.5])
trees = st.recursive(
    leaves, lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(keys, inner, max_size=4))
)


@given(trees)
def test_names_are_unique_and_plain(state: Any) -> None:
    tree, tensors = flatten(state)
    names = tensor_names(pack_tree(tree), len(tensors))
    described = [spec_of(tensor) for tensor in tensors]
    stored = [piece.name for part in lay_out(names, described, 0) for piece in part.pieces]
    assert len(set(stored)) == len(tensors)
    for _, _, image in images_of(state):
        assert len([name for name in load(bytes(image)) if not name.startswith("__pad_")]) == len(tensors)


def test_names_are_paths() -> None:
    tree, tensors = flatten({"parameters": {"fc1.weight": torch.ones(1)}, "optimizer": [{0: (torch.ones(1),)}]})
    assert tensor_names(pack_tree(tree), len(tensors)) == ["parameters/fc1.weight", "optimizer/0/0/0"]
    tree, tensors = flatten(torch.ones(1))
    assert tensor_names(pack_tree(tree), len(tensors)) == ["state"]


def test_long_names_are_cut() -> None:
    state = {"x" * 10**6: [torch.zeros(1) for _ in range(50)], "y" * 10**6: torch.ones(1)}
    tree, tensors = flatten(state)
    names = tensor_names(pack_tree(tree), len(tensors))
    assert len(set(names)) == 51 and max(map(len, names)) <= NAME_CHARACTERS_MAX


@pytest.mark.parametrize(
    "tree",
    [
        {"T": 1},
        [{"T": 0}, {"T": 0}],
        [],
        {"T": True},
        {"T": -1},
        {"T": [0]},
        {"d": [["a"]]},
        {"d": [[None, {"T": 0}]]},
        {"d": 3},
        {"t": "x"},
        {"T": 0, "a": 0},
    ],
)
def test_a_tree_that_does_not_hold_its_tensors_is_refused(tree: Any) -> None:
    with pytest.raises(ProtocolError):
        tensor_names(json.dumps(tree).encode(), 1)


def test_a_tree_that_is_too_deep_is_refused() -> None:
    for depth in (100, 10_000):
        with pytest.raises(ProtocolError):
            tensor_names(b"[" * depth + b'{"T":0}' + b"]" * depth, 1)
