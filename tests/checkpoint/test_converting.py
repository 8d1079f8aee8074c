"""Checkpoints to other programs' files and back. Their own readers read what is written; nothing in a file is run."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import struct
import warnings
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint as dcp

from holdfast.checkpoint import load, save
from holdfast.checkpoint.converting.exporting import export, kind_of, weights_of
from holdfast.checkpoint.converting.importing import read_state
from holdfast.checkpoint.restoring.reading import list_checkpoints, read_manifest
from holdfast.checkpoint.saving.writing import write_state
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.cli.main import main
from holdfast.core.errors import ConfigError, IntegrityError
from holdfast.state.snapshot import Holder

from .conftest import every_kind, snapshot_of


def same(one: Any, other: Any) -> bool:
    return snapshot_of(one, 0).digest() == snapshot_of(other, 0).digest()


def network() -> torch.nn.Module:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.Flatten())
    return model.to(memory_format=torch.channels_last)


def names_in(path: Path) -> list[str]:
    return sorted(found.name for found in path.iterdir())


def exported(path: Path, state: Any, name: str, **options: Any) -> Path:
    step = save(str(path / "checkpoints"), state)
    storage = LocalStorage(path / "checkpoints")
    target = path / name
    options["kind"] = kind_of(target, options.get("kind"))
    export(storage, read_manifest(storage, step), target, **options)
    assert names_in(path) == sorted(["checkpoints", name]), "nothing is left beside it"
    return target


@pytest.mark.usefixtures("small_parts")
def test_a_whole_state_to_safetensors_and_back(tmp_path: Path) -> None:
    state = {
        **every_kind(),
        "counter": Counter(a=2),
        "array": numpy.arange(6).reshape(2, 3),
        "number": numpy.float32(2),
    }
    file = exported(tmp_path, state, "all.safetensors")
    assert same(read_state(file), state), "bit for bit, with dtypes and memory orders"
    read = load_file(file)
    assert torch.equal(read["channels_last"], state["channels_last"]) and read["large"].equal(state["large"])
    assert torch.equal(read["model/fc.weight"], state["model"]["fc.weight"])


def test_a_whole_state_to_torch_and_back(tmp_path: Path) -> None:
    state = {**every_kind(), "counter": Counter(a=2), "dtype": torch.float16}
    file = exported(tmp_path, state, "all.pt")
    assert file.stat().st_size < 400_000, "each tensor's own bytes, not those of the memory around it"
    assert same(torch.load(file, weights_only=True), {**state, "holdfast_step": 0}) and same(read_state(file), state)


@pytest.mark.parametrize("name", ["all.safetensors", "all.pt", "dcp"])
def test_the_step_comes_back_too(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place, other = str(tmp_path / "checkpoints"), str(tmp_path / "other")
    save(place, {"model": {"w": torch.ones(3)}}, step=120)
    to = ["--to", str(tmp_path / name), *(["--as", "dcp"] if name == "dcp" else [])]
    assert main(["checkpoint", "export", place, *to]) == 0
    assert main(["checkpoint", "import", other, "--from", str(tmp_path / name)]) == 0
    assert main(["checkpoint", "import", other, "--from", str(tmp_path / name), "--step", "7"]) == 0
    assert "made the checkpoint of step 120" in capsys.readouterr().out
    assert [entry.step for entry in list_checkpoints(LocalStorage(Path(other)))] == [120, 7]
    assert torch.equal(load(other)["model"]["w"], torch.ones(3)) and list(load(other)) == ["model"]


def test_numpy_becomes_torch_there(tmp_path: Path) -> None:
    read = torch.load(exported(tmp_path, {"a": numpy.arange(3), "b": [numpy.float64(2.5)]}, "x.pt"), weights_only=True)
    assert torch.equal(read["a"], torch.arange(3)) and read["b"] == [2.5]


def test_a_whole_state_to_dcp_and_back(tmp_path: Path) -> None:
    state = {"model": network().state_dict(), "lr": 0.5, "list": [torch.ones(3), {"x": None, "deep": torch.zeros(2)}]}
    directory = exported(tmp_path, state, "dcp", kind="dcp")
    into = {"model": network().state_dict(), "lr": 0.0, "list": [torch.zeros(3), {"x": 1, "deep": torch.ones(2)}]}
    for tensor in into["model"].values():
        tensor.zero_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(into, checkpoint_id=str(directory), no_dist=True)
    assert same(into, state)
    assert same(read_state(directory), {**state, "model": dict(state["model"])}), "there, a dict has no other kind"


def test_a_large_tensor_in_many_dcp_chunks(tmp_path: Path) -> None:
    """As several ranks would have written it: the reader puts the chunks together."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import (
        ChunkStorageMetadata,
        Metadata,
        MetadataIndex,
        TensorProperties,
        TensorStorageMetadata,
    )

    whole = torch.randn(6, 4)
    directory = tmp_path / "dcp"
    directory.mkdir()
    chunks, places = [], {}
    for rank in range(3):
        piece, offsets = whole[2 * rank : 2 * rank + 2].clone(), torch.Size([2 * rank, 0])
        buffer = io.BytesIO()
        torch.save(piece, buffer)
        (directory / f"__{rank}_0.distcp").write_bytes(b"before" + buffer.getvalue())
        chunks.append(ChunkStorageMetadata(offsets, piece.size()))
        places[MetadataIndex("w", offsets)] = _StorageInfo(f"__{rank}_0.distcp", 6, len(buffer.getvalue()))
    about = TensorStorageMetadata(TensorProperties(torch.float32), whole.size(), chunks)
    for protocol in range(2, 6):
        metadata = Metadata({"w": about}, {"w": ("model", "w")}, places)
        (directory / ".metadata").write_bytes(pickle.dumps(metadata, protocol))
        assert same(read_state(directory), {"model": {"w": whole}}), protocol
    metadata = Metadata({"w": TensorStorageMetadata(about.properties, about.size, chunks[:2])}, None, places)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ConfigError, match="damaged"):
        read_state(directory)
    huge = TensorStorageMetadata(about.properties, torch.Size([2**40]), chunks)
    (directory / ".metadata").write_bytes(pickle.dumps(Metadata({"w": huge}, None, places)))
    with pytest.raises(ConfigError, match="damaged"):
        read_state(directory)


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt", "w.dcp"])
def test_weights_under_the_names_of_the_model(tmp_path: Path, name: str) -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    optimizer.step()
    storage = LocalStorage(tmp_path / "run")
    write_state(storage, Holder(model, optimizer).capture(7), created_s=0)
    target = tmp_path / name
    kind = "dcp" if name == "w.dcp" else kind_of(target, None)
    export(storage, read_manifest(storage, 7), target, kind=kind, only_parameters=True)
    other = network()
    other.load_state_dict(read_state(target))
    assert same(other.state_dict(), model.state_dict())
    if name == "w.safetensors":
        assert {key: tuple(value.shape) for key, value in load_file(target).items()} == {
            key: tuple(value.shape) for key, value in model.state_dict().items()
        }


def test_only_the_parts_with_the_weights_are_read(tmp_path: Path, small_parts: int) -> None:
    state = {"model": {"w": torch.randn(3)}, "other": torch.randn(100_000)}
    save(str(tmp_path / "c"), state)
    storage = LocalStorage(tmp_path / "c")
    manifest = read_manifest(storage, 0)
    assert len(manifest.parts) > 5
    damaged = tmp_path / "c" / manifest.path(manifest.parts[0])
    damaged.write_bytes(bytes(damaged.stat().st_size))
    export(storage, manifest, tmp_path / "w.pt", kind="torch", only_parameters=True)
    with pytest.raises(IntegrityError, match="header"):
        export(storage, manifest, tmp_path / "all.pt", kind="torch")
    assert names_in(tmp_path) == ["c", "w.pt"], "what is not whole is not there"


def test_where_the_weights_are(tmp_path: Path) -> None:
    def of(state: Any) -> dict[str, int]:
        storage = LocalStorage(tmp_path)
        return weights_of(read_manifest(storage, save(str(tmp_path), state)))

    ones = torch.ones(1)
    assert of({"x": ones, "model": {"a": ones, "b": ones}}) == {"a": 1, "b": 2}
    assert of({"a": ones, "b": ones}) == {"a": 0, "b": 1}
    for state in ({"a": ones, "b": 2}, [ones], ones, {}, {"model": {"a": {"b": ones}}}):
        with pytest.raises(ConfigError, match="does not say which"):
            of(state)


def test_what_is_there_stays(tmp_path: Path) -> None:
    save(str(tmp_path / "c"), {"a": torch.ones(1)})
    storage = LocalStorage(tmp_path / "c")
    manifest = read_manifest(storage, 0)
    (tmp_path / "x.pt").write_text("mine")
    for target, words in ((tmp_path / "x.pt", "already there"), (tmp_path / "none" / "x.pt", "no directory")):
        with pytest.raises(ConfigError, match=words):
            export(storage, manifest, target, kind="torch")
    assert (tmp_path / "x.pt").read_text() == "mine"
    with pytest.raises(ConfigError, match="in which format"):
        kind_of(tmp_path / "x", None)


def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(str(tmp_path / "c"), {"a": torch.ones(1)})
    storage = LocalStorage(tmp_path / "c")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match="No space left"):
        export(storage, read_manifest(storage, 0), tmp_path / "x.pt", kind="torch")
    assert names_in(tmp_path) == ["c"]


# -- what others wrote


def test_files_of_the_libraries(tmp_path: Path) -> None:
    dtypes = every_kind()["dtypes"]
    state = {key: dtypes[key].clone() for key in ("bfloat16", "bool", "float32", "int8")}
    save_file(state, tmp_path / "x.safetensors")
    assert same(dict(sorted(read_state(tmp_path / "x.safetensors").items())), state)
    torch.save(state, tmp_path / "new.pt")
    torch.save(state, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    assert same(read_state(tmp_path / "new.pt"), state) and same(read_state(tmp_path / "old.pth"), state)


def test_safetensors_that_are_not_aligned(tmp_path: Path) -> None:
    header = (
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"F64","shape":[1],"data_offsets":[1,9]}}'
    )
    data = len(header).to_bytes(8, "little") + header + b"\x07" + struct.pack("<d", 2.5)
    (tmp_path / "x.safetensors").write_bytes(data)
    assert same(
        read_state(tmp_path / "x.safetensors"),
        {"a": torch.tensor([7], dtype=torch.uint8), "b": torch.tensor([2.5]).double()},
    )


class Trap:
    """What a pickle could do: its file would be made if anything in it were run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.mkdir, (str(self.path),))


def test_nothing_in_a_file_is_run(tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    torch.save({"a": Trap(sprung)}, tmp_path / "x.pt")
    torch.save({"a": Trap(sprung)}, tmp_path / "y.pt", _use_new_zipfile_serialization=False)
    for name in ("x.pt", "y.pt"):
        with pytest.raises(ConfigError, match="nothing but tensors and plain values"):
            read_state(tmp_path / name)
    directory = tmp_path / "dcp"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"a": torch.ones(1), "b": Trap(sprung)}, checkpoint_id=str(directory), no_dist=True)
    sprung.rmdir() if sprung.exists() else None
    with pytest.raises(ConfigError, match="nothing but tensors and plain values"):
        read_state(directory)
    for protocol in range(6):
        (directory / ".metadata").write_bytes(pickle.dumps(Trap(sprung), protocol))
        with pytest.raises(ConfigError):
            read_state(directory)
    assert not sprung.exists()
    pickle.loads(pickle.dumps(Trap(sprung)))
    assert sprung.exists(), "the trap is one"


def test_no_file_outside_the_directory_is_read(tmp_path: Path) -> None:
    directory = tmp_path / "dcp"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"a": torch.ones(1)}, checkpoint_id=str(directory), no_dist=True)
    shutil.copy(directory / "__0_0.distcp", tmp_path / "outside")
    data = (directory / ".metadata").read_bytes()
    assert b"\x8c\x0c__0_0.distcp" in data
    (directory / ".metadata").write_bytes(data.replace(b"\x8c\x0c__0_0.distcp", b"\x8c\x0a../outside"))
    with pytest.raises(ConfigError, match="not known here"):
        read_state(directory)


@given(st.data())
def test_damaged_files_are_refused_in_one_sentence(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Bytes of such files have no digests, so a change may pass; but it never ends in anything but a ConfigError."""
    path = tmp_path_factory.mktemp("damaged")
    name = data.draw(st.sampled_from(["x.safetensors", "x.pt", "dcp"]))
    state = {"a": torch.arange(5.0), "b": {"c": torch.ones(2, dtype=torch.bool)}}
    target = exported(path, state, name, **({"kind": "dcp"} if name == "dcp" else {}))
    file = data.draw(st.sampled_from(sorted(target.iterdir()))) if target.is_dir() else target
    content = bytearray(file.read_bytes())
    where = data.draw(st.integers(0, 1500)) % len(content)  # lengths differ with the name of the directory
    if data.draw(st.booleans()):
        content[where] ^= data.draw(st.integers(1, 255))
    else:
        del content[where:]
    file.write_bytes(content)
    try:
        read_state(target)
    except ConfigError as error:
        assert str(path) in error.message and "\n" not in error.message


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 2**40]},
        {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]},
        {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0.0, 8.0]},
        {"dtype": "X", "shape": [2], "data_offsets": [0, 8]},
        {"shape": [2]},
        [],
        7,
    ],
)
def test_a_header_that_lies(tmp_path: Path, entry: Any) -> None:
    header = json.dumps({"a": entry}).encode()
    (tmp_path / "x.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ConfigError, match=r"damaged|cannot be read"):
        read_state(tmp_path / "x.safetensors")


def test_what_is_not_there_or_not_known(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(b"")
    (tmp_path / "x.safetensors").write_bytes(b"")
    (tmp_path / "x.pt").write_bytes(b"")
    with zipfile.ZipFile(tmp_path / "y.pt", "w") as archive:
        archive.writestr("a", "b")
    for name in ("none.pt", "x.bin", "x.safetensors", "x.pt", "y.pt", "."):
        with pytest.raises(ConfigError) as raised:
            read_state(tmp_path / name)
        assert raised.value.hint and "\n" not in raised.value.message


def test_what_was_imported_is_a_checkpoint(tmp_path: Path) -> None:
    state = {"model": network().state_dict()}
    torch.save(state, tmp_path / "x.pt")
    save(str(tmp_path / "c"), read_state(tmp_path / "x.pt"))
    assert same(load(str(tmp_path / "c")), state)
