"""Whatever happens to the bytes of a checkpoint is found and named, and an older one is used instead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast.checkpoint.format.manifest import Manifest, manifest_name
from holdfast.checkpoint.restoring.reading import list_checkpoints, newest_valid, read_snapshot, verify
from holdfast.checkpoint.saving.writing import write_state
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.checkpoint.storage.port import Storage
from holdfast.core.errors import IntegrityError, NotStored, StorageUnavailable
from holdfast.state.layout import allocate, memory_of
from holdfast.state.snapshot import Snapshot

from .conftest import every_kind, snapshot_of

pytestmark = pytest.mark.usefixtures("small_parts")
OLD, NEW = 10, 20


class Two:
    """A directory with a checkpoint of step 10 and one of step 20, of different states with the same layout."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.storage = LocalStorage(path)
        self.snapshots = {step: snapshot_of(every_kind(step), step) for step in (OLD, NEW)}
        self.manifests = {step: write_state(self.storage, s, created_s=0) for step, s in self.snapshots.items()}

    @property
    def newest(self) -> Manifest:
        return self.manifests[NEW]

    def file(self, number: int, step: int = NEW) -> Path:
        manifest = self.manifests[step]
        return self.path / manifest.path(manifest.parts[number])

    def flip(self, file: Path, position: int, bit: int = 0) -> None:
        data = bytearray(file.read_bytes())
        data[position] ^= 1 << bit
        file.write_bytes(data)

    def expect(self, *named: str, used: int = OLD) -> list[str]:
        """All of these are found in step 20, and the state of `used` is what is loaded."""
        damages = verify(self.storage, NEW)
        assert len(damages) == len(named), damages
        for words, sentence in zip(sorted(named), damages, strict=True):
            assert words in sentence
        warnings: list[str] = []
        found = newest_valid(self.storage, warn=warnings.append)
        assert found is not None
        manifest, snapshot = found
        assert manifest.step == snapshot.step == used and same(snapshot, self.snapshots[used])
        if named:
            assert len(warnings) == 1 and "step 20 cannot be used" in warnings[0]
            assert any(warnings[0].endswith(sentence) for sentence in damages)
            with pytest.raises((IntegrityError, NotStored)):
                read_snapshot(self.storage, NEW)
            with pytest.raises((IntegrityError, NotStored)):
                read_snapshot(self.storage, NEW, place=lambda tree, specs: allocate(specs))
        return damages


def same(one: Snapshot, other: Snapshot) -> bool:
    return one.digest() == other.digest()


@pytest.fixture
def two(tmp_path: Path) -> Two:
    return Two(tmp_path)


def test_nothing_is_wrong(two: Two) -> None:
    two.expect(used=NEW)
    assert verify(two.storage, OLD) == []
    assert [(c.step, c.committed, c.parts) for c in list_checkpoints(two.storage)] == [
        (NEW, True, len(two.newest.parts)),
        (OLD, True, len(two.newest.parts)),
    ]


def test_tensors_are_read_where_they_are_placed(two: Two) -> None:
    places: list[torch.Tensor] = []

    def place(tree: bytes, specs: Any) -> list[torch.Tensor]:
        assert tree == two.newest.tree and tuple(specs) == two.newest.specs
        places.extend(allocate(specs))
        return places

    done: list[tuple[int, int]] = []
    _, snapshot = read_snapshot(two.storage, NEW, place=place, progress=lambda *bytes: done.append(bytes))
    assert same(snapshot, two.snapshots[NEW])
    assert [tensor.data_ptr() for tensor in snapshot.tensors] == [tensor.data_ptr() for tensor in places]
    assert done[-1] == (two.newest.nbytes, two.newest.nbytes) and len(done) == len(two.newest.parts)


def test_a_large_tensor_is_one_piece_of_memory(two: Two) -> None:
    number = two.newest.names.index("large")
    pieces = [piece for part in two.newest.layout for piece in part.pieces if piece.tensor == number]
    assert len(pieces) > 5
    _, snapshot = read_snapshot(two.storage, NEW)
    assert bytes(memory_of(snapshot.tensors[number])) == bytes(memory_of(two.snapshots[NEW].tensors[number]))
    snapshot.tensors[number].add_(1)  # and may be written to


@pytest.mark.parametrize("bit", (0, 3, 7))
def test_a_bit_of_every_tensor(two: Two, bit: int) -> None:
    """In the middle of every piece of every tensor, one after the other, and all of them are named at the end."""
    named = []
    for part in two.newest.layout:
        file = two.file(part.number)
        for piece in part.pieces:
            if piece.stop > piece.start:
                named.append(f"{file.name}: the bytes of {piece.name} are")
                two.flip(file, (2 * piece.offset + piece.stop - piece.start) // 2, bit)
                assert any(named[-1] in sentence for sentence in verify(two.storage, NEW))
    assert len(named) > sum(spec.nbytes > 0 for spec in two.newest.specs), "all of them, and some in several pieces"
    two.expect(*named)


@pytest.mark.parametrize("where", ["length", "JSON", "spaces"])
def test_a_bit_of_a_header(two: Two, where: str) -> None:
    position = {"length": 1, "JSON": 100, "spaces": two.newest.layout[1].data_start - 1}[where]
    two.flip(two.file(1), position)
    two.expect(f"{two.file(1).name}: its header is not the one that was written")


def test_a_bit_of_the_padding(two: Two) -> None:
    part = next(part for part in two.newest.layout if list(part.gaps()))
    start, _ = next(part.gaps())
    two.flip(two.file(part.number), start)
    two.expect(f"{two.file(part.number).name}: the padding at byte {start} is not zero")


@pytest.mark.parametrize("position", [0, 20, 60, 500, -2])
def test_a_bit_of_the_manifest(two: Two, position: int) -> None:
    two.flip(two.path / manifest_name(NEW), position)
    two.expect(f"{manifest_name(NEW)}: the manifest's bytes are not those that were written")


@pytest.mark.parametrize("length", [0, 7, 4095, 4096, -1])
def test_a_part_is_cut(two: Two, length: int) -> None:
    data = two.file(2).read_bytes()
    two.file(2).write_bytes(data[:length])
    two.expect(f"{two.file(2).name}: it has {len(data[:length])} bytes instead of {len(data)}")


def test_a_part_is_longer(two: Two) -> None:
    data = two.file(2).read_bytes()
    two.file(2).write_bytes(data + b"\0")
    two.expect(f"{two.file(2).name}: it has {len(data) + 1} bytes")


@pytest.mark.parametrize("length", [0, 11, -1])
def test_the_manifest_is_cut(two: Two, length: int) -> None:
    file = two.path / manifest_name(NEW)
    file.write_bytes(file.read_bytes()[:length])
    two.expect(manifest_name(NEW))


def test_parts_are_missing(two: Two) -> None:
    two.file(0).unlink()
    two.file(3).unlink()
    two.expect(f"{two.file(0).name}: it is missing", f"{two.file(3).name}: it is missing")


def test_without_its_manifest_it_is_no_checkpoint(two: Two) -> None:
    (two.path / manifest_name(NEW)).unlink()
    assert [entry.committed for entry in list_checkpoints(two.storage)] == [False, True]
    found = newest_valid(two.storage, warn=pytest.fail)
    assert found is not None and same(found[1], two.snapshots[OLD])


def swap(one: Path, other: Path) -> None:
    one_bytes, other_bytes = one.read_bytes(), other.read_bytes()
    one.write_bytes(other_bytes)
    other.write_bytes(one_bytes)


def test_two_parts_are_swapped(two: Two) -> None:
    sizes = [part.size for part in two.newest.parts]
    first, second = next((i, j) for i in range(len(sizes)) for j in range(i) if sizes[i] == sizes[j])
    swap(two.file(first), two.file(second))
    two.expect(*(f"{two.file(n).name}: its header is not the one that was written" for n in (first, second)))


def test_two_parts_swapped_between_steps(two: Two) -> None:
    swap(two.file(1), two.file(1, OLD))
    assert len(verify(two.storage, NEW)) == len(verify(two.storage, OLD)) == 1
    with pytest.raises(IntegrityError, match="none of the 2 checkpoints"):
        newest_valid(two.storage, warn=lambda text: None)


def test_the_manifests_are_swapped(two: Two) -> None:
    swap(two.path / manifest_name(OLD), two.path / manifest_name(NEW))
    assert verify(two.storage, NEW) == [f"{manifest_name(NEW)}: it is the manifest of step {OLD}"]
    assert verify(two.storage, OLD) == [f"{manifest_name(OLD)}: it is the manifest of step {NEW}"]
    warnings: list[str] = []
    with pytest.raises(IntegrityError, match="none of the 2 checkpoints"):
        newest_valid(two.storage, warn=warnings.append)
    assert len(warnings) == 2


def test_an_older_manifest_in_a_newer_directory(two: Two) -> None:
    (two.path / manifest_name(NEW)).write_bytes((two.path / manifest_name(OLD)).read_bytes())
    two.expect(f"{manifest_name(NEW)}: it is the manifest of step {OLD}")


def test_storage_that_does_not_answer_is_no_damage(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise StorageUnavailable("no answer")

    monkeypatch.setattr(LocalStorage, "read_into", fail)
    for read in (newest, verify_newest):
        with pytest.raises(StorageUnavailable):
            read(two.storage)


def newest(storage: Storage) -> None:
    newest_valid(storage, warn=pytest.fail)


def verify_newest(storage: Storage) -> None:
    verify(storage, NEW)


def test_nothing_there_at_all(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "none")
    assert newest_valid(storage, warn=pytest.fail) is None
    assert list_checkpoints(storage) == []
    with pytest.raises(NotStored):
        read_snapshot(storage, 3)
    assert len(verify(storage, 3)) == 1
