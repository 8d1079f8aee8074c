"""A manifest describes what was written, or it is refused: quickly, and before memory is taken for what it claims."""

from __future__ import annotations

import json
import math
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from holdfast.checkpoint.format.manifest import (
    MANIFEST_BYTES_MAX,
    Manifest,
    decode,
    directory_of,
    manifest_name,
    step_of,
)
from holdfast.checkpoint.restoring import reading
from holdfast.checkpoint.restoring.reading import newest_valid, read_manifest, read_snapshot, verify
from holdfast.checkpoint.saving import side_by_side
from holdfast.checkpoint.saving.writing import commit, missing_parts, write_state
from holdfast.core.errors import ConfigError, IntegrityError, ProtocolError, StorageUnavailable
from tests.harness.memory_storage import MemoryStorage

from .conftest import every_kind, snapshot_of

REFUSED = (IntegrityError, ProtocolError)


def written(step: int = 3, **about: Any) -> tuple[MemoryStorage, Manifest]:
    storage = MemoryStorage()
    return storage, write_state(storage, snapshot_of(every_kind(), step), created_s=1.5, **about)


def test_it_reads_back() -> None:
    metrics = {"loss": 0.1, "bad": math.nan, "worse": -math.inf}
    _, manifest = written(run="a run", config={"batch_size": [1, {"x": None}]}, metrics=metrics)
    again = decode(manifest.encode())
    assert again.same_state(manifest) and again.names == manifest.names and again.layout == manifest.layout
    assert (again.run, again.config, again.created_s) == ("a run", {"batch_size": [1, {"x": None}]}, 1.5)
    assert repr(again.metrics) == repr(metrics)
    assert json.loads(manifest.encode())["step"] == 3, "it is plain JSON"


@given(st.data())
def test_every_flipped_bit_is_found(data: st.DataObject) -> None:
    encoded = bytearray(written()[1].encode())
    position = data.draw(st.integers(0, 8 * len(encoded) - 1))
    encoded[position // 8] ^= 1 << position % 8
    with pytest.raises(IntegrityError):
        decode(bytes(encoded))


def test_every_bit_of_its_beginning_is_found() -> None:
    whole = written()[1].encode()
    for position in range(8 * 80):
        encoded = bytearray(whole)
        encoded[position // 8] ^= 1 << position % 8
        with pytest.raises(IntegrityError):
            decode(bytes(encoded))
    for length in range(80):
        for cut in (whole[:length], whole[: -1 - length], whole + bytes(length + 1)):
            with pytest.raises(IntegrityError):
                decode(cut)


@given(st.binary(max_size=300))
def test_no_bytes_are_taken_for_one(data: bytes) -> None:
    with pytest.raises(REFUSED):
        decode(data)


# -- manifests that lie, with a digest that fits


def sealed(body: bytes) -> bytes:
    assert body[:1] == b"{"
    return b'{"digest":"' + xxhash.xxh3_128_hexdigest(body).encode() + b'",' + body[1:]


def changed(change: Callable[[dict[str, Any]], None]) -> bytes:
    body = json.loads(written()[1].encode())
    del body["digest"]
    change(body)
    return sealed(json.dumps(body, separators=(",", ":")).encode())


def put(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda body: body.update(values)


def put_part(index: int, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda body: body["parts"][0].__setitem__(index, value)


def put_tensor(value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda body: body["tensors"].__setitem__(0, value)


LIES = {
    "another format": put(format="holdfast/2"),
    "no format": lambda body: body.pop("format"),
    "negative step": put(step=-1),
    "huge step": put(step=10**12),
    "step that is a truth": put(step=True),
    "step that is a float": put(step=3.0),
    "run that is a number": put(run=3),
    "time that is no number": put(created_s="now"),
    "time that is not finite": put(created_s=math.nan),
    "negative time": put(created_s=-1),
    "time beyond all floats": put(created_s=10**400),
    "metric that is a list": put(metrics={"loss": []}),
    "metric that is a word": put(metrics={"loss": "low"}),
    "metric beyond all floats": put(metrics={"loss": 10**400}),
    "metrics that are a list": put(metrics=[]),
    "config that is a list": put(config=[]),
    "no parts": put(parts=[]),
    "parts that are a number": put(parts=7),
    "part that is no pair": put(parts=[["part-0000"]]),
    "part with another number": put_part(0, f"part-0001-{'0' * 32}.safetensors"),
    "part outside the directory": put_part(0, f"../part-0000-{'0' * 32}.safetensors"),
    "part with a long number": put_part(0, f"part-00000-{'0' * 32}.safetensors"),
    "part of negative size": put_part(1, -4096),
    "part of huge size": put_part(1, 2**60),
    "part whose size is a float": put_part(1, 4096.0),
    "tensors that are a number": put(tensors=7),
    "tensor too few": lambda body: body["tensors"].pop(),
    "tensor of a huge size": put_tensor(["float32", [2**29, 2**29]]),
    "tensor of more than all memory": put_tensor(["float32", [2**40]]),
    "tensor of negative size": put_tensor(["float32", [-1]]),
    "tensor of an unknown dtype": put_tensor(["Tensor", [1]]),
    "tensor that is a word": put_tensor("float32"),
    "tree that is no text": put(tree=7),
    "tree that is no JSON": put(tree="{"),
    "tree with a tensor twice": put(tree='[{"T":0},{"T":0}]'),
    "tree that is deep": put(tree="[" * 100_000 + "]" * 100_000),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_manifest_that_lies_is_refused(lie: str) -> None:
    data = changed(LIES[lie])
    begin = time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises(REFUSED):
            decode(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 32 * 2**20, "no memory for what is claimed"
    assert time.process_time() - begin < 5


def test_a_manifest_that_is_deep_is_refused() -> None:
    with pytest.raises(REFUSED):
        decode(sealed(b'{"format":' + b"[" * 100_000 + b"]" * 100_000 + b"}"))
    with pytest.raises(REFUSED):
        decode(sealed(b'{"format":NaN}'))
    with pytest.raises(REFUSED):
        decode(b'{"digest":"' + bytes(MANIFEST_BYTES_MAX))


def test_no_memory_is_taken_for_parts_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest that agrees with itself, of a state that nobody has."""
    storage = MemoryStorage()
    snapshot = snapshot_of([torch.zeros(1)], 3)
    manifest = write_state(storage, snapshot, created_s=0)
    huge = 64 * 2**20
    parts = [[f"part-{n:04d}-{'0' * 32}.safetensors", huge + 4096] for n in range(4096)]
    body = {**json.loads(manifest.encode()), "tensors": [["uint8", [len(parts) * huge]]], "parts": parts}
    del body["digest"]
    storage.write(manifest_name(3), memoryview(sealed(json.dumps(body, separators=(",", ":")).encode())))
    claimed = read_manifest(storage, 3)
    assert claimed.nbytes > 2**37
    monkeypatch.setattr(reading, "image_buffer", pytest.fail)
    monkeypatch.setattr(side_by_side, "image_buffer", pytest.fail)
    with pytest.raises(IntegrityError, match="it is missing"):
        read_snapshot(storage, 3)
    assert len(verify(storage, 3)) == len(parts)
    with pytest.raises(IntegrityError, match="none of the 1 checkpoints"):
        newest_valid(storage, warn=lambda text: None)


def test_a_state_with_too_much_beside_its_tensors_is_refused_when_written() -> None:
    _, manifest = written()
    config = {"text": "x" * MANIFEST_BYTES_MAX}
    fields = {name: getattr(manifest, name) for name in Manifest.__dataclass_fields__}
    with pytest.raises(ConfigError, match="would have"):
        Manifest(**{**fields, "config": config}).encode()


# -- names of directories, and the commit


@given(st.integers(0, 10**12 - 1))
def test_directories_and_steps(step: int) -> None:
    assert step_of(directory_of(step)) == step_of(manifest_name(step)) == step


def test_other_names_are_no_checkpoints() -> None:
    for name in ("checkpoint-1", "checkpoint-0000000000001", "checkpoint-00000000000x", "x/checkpoint-000000000001"):
        assert step_of(name) is None
    for step in (-1, 10**12):
        with pytest.raises(ConfigError):
            directory_of(step)


def test_the_first_commit_counts() -> None:
    storage, manifest = written()
    assert commit(storage, manifest), "the same once more: whoever did not hear the answer asks again"
    fields = {name: getattr(manifest, name) for name in Manifest.__dataclass_fields__}
    assert commit(storage, Manifest(**{**fields, "created_s": 99.0})), "another worker's, of the same bytes"
    with pytest.raises(ConfigError, match="already has a checkpoint of step 3"):
        write_state(storage, snapshot_of({"other": torch.ones(3)}, 3), created_s=0)
    assert read_manifest(storage, 3).same_state(manifest)
    storage.write(manifest_name(3), memoryview(b"damaged"))
    assert not commit(storage, manifest)


def test_nothing_is_committed_if_a_part_was_not_written() -> None:
    storage = MemoryStorage()
    storage.fail_with(StorageUnavailable("full"), calls={"write"})
    with pytest.raises(StorageUnavailable):
        write_state(storage, snapshot_of(every_kind(), 3), created_s=0)
    assert storage.list() == []


def test_missing_parts() -> None:
    storage, manifest = written()
    assert missing_parts(storage.list(), 3, manifest.parts) == []
    assert missing_parts(storage.list(), 4, manifest.parts) == list(manifest.parts)
    storage.write(manifest.path(manifest.parts[0]), memoryview(b"cut"))
    assert missing_parts(storage.list(), 3, manifest.parts) == [manifest.parts[0]]
