"""The memory of a neighbour: what it held outlives it, and what it had only begun counts for nothing."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from holdfast.checkpoint.saving.save_buffer import LARGE_BYTES, NeighbourBuffer, SaveBuffer, note_path

SIZE = 3 * LARGE_BYTES + 5 * 4096
NOT_IN_A_HURRY: Callable[[], bool] = lambda: False  # noqa: E731


@pytest.fixture
def held(tmp_path: Path) -> Iterator[SaveBuffer]:
    made = SaveBuffer(note_path(tmp_path, "w0.1"))
    yield made
    made.close()


def neighbour_of(run_dir: Path) -> NeighbourBuffer:
    found = NeighbourBuffer.find(note_path(run_dir, "w0.1"))
    assert found is not None
    return found


def test_a_neighbour_reads_what_was_copied(held: SaveBuffer, tmp_path: Path) -> None:
    buffer = held.make(SIZE, in_a_hurry=NOT_IN_A_HURRY)
    neighbour, image = neighbour_of(tmp_path), torch.zeros(8192, dtype=torch.uint8)
    held.begin()
    buffer[4096 : 4096 + 8192] = 7
    assert not neighbour.holds(5) and not neighbour.read(5, 4096, image)
    held.done(5)
    assert neighbour.wait(5, 0.0) and neighbour.read(5, 4096, image)
    assert bool((image == 7).all())
    assert not neighbour.holds(6) and not neighbour.read(6, 4096, image), "of another save"
    held.begin()
    assert not neighbour.read(5, 4096, image), "of a save that another is copied over"


def test_without_a_mark_nothing_is_held(held: SaveBuffer, tmp_path: Path) -> None:
    held.make(SIZE, in_a_hurry=NOT_IN_A_HURRY)
    held.done(0)
    assert not neighbour_of(tmp_path).holds(0)


def test_a_neighbour_follows_one_that_grows(held: SaveBuffer, tmp_path: Path) -> None:
    held.make(4096, in_a_hurry=NOT_IN_A_HURRY)
    neighbour, image = neighbour_of(tmp_path), torch.zeros(4096, dtype=torch.uint8)
    buffer = held.make(SIZE, in_a_hurry=NOT_IN_A_HURRY)
    assert held.size == SIZE
    buffer[-4096:] = 9
    held.done(3)
    assert neighbour.read(3, SIZE - 4096, image) and bool((image == 9).all())
    assert not neighbour.read(3, SIZE + 3 * LARGE_BYTES, image), "behind its end"


@pytest.mark.parametrize("hurry", [False, True])
def test_all_of_it_was_used_when_it_is_made(held: SaveBuffer, hurry: bool) -> None:
    buffer = held.make(SIZE, in_a_hurry=lambda: hurry)
    faults = _faults()
    buffer.fill_(1)
    assert _faults() - faults < 64, "its pages were made only now"
    assert int(buffer.sum(dtype=torch.int64)) == SIZE


def test_where_memory_is_not_promised_twice_it_is_taken_at_once(
    held: SaveBuffer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "strict").write_text("2\n")
    monkeypatch.setattr("holdfast.checkpoint.saving.save_buffer.OVERCOMMIT", tmp_path / "strict")
    held.make(SIZE, in_a_hurry=NOT_IN_A_HURRY)
    said = json.loads(note_path(tmp_path, "w0.1").read_text())
    assert os.fstat(said["file"]).st_blocks * 512 >= SIZE + 2 * LARGE_BYTES
    monkeypatch.setattr(os, "posix_fallocate", _full)
    assert held.make(2 * SIZE, in_a_hurry=NOT_IN_A_HURRY).numel() >= 2 * SIZE
    assert NeighbourBuffer.find(note_path(tmp_path, "w0.1")) is None


def _full(file: int, offset: int, size: int) -> None:
    raise OSError(errno.ENOMEM, "no memory is left")


LIMITED = """
import resource, sys
from pathlib import Path
from holdfast.checkpoint.saving.save_buffer import LARGE_BYTES, NeighbourBuffer, SaveBuffer, note_path
note = note_path(Path(sys.argv[1]), "w0.1")
held = SaveBuffer(note)
held.make(4096, in_a_hurry=lambda: False)
assert NeighbourBuffer.find(note) is not None
resource.setrlimit(resource.RLIMIT_FSIZE, (3 * LARGE_BYTES, 3 * LARGE_BYTES))
buffer = held.make(4 * LARGE_BYTES, in_a_hurry=lambda: False)
buffer.fill_(1)
held.begin()
held.done(5)
assert NeighbourBuffer.find(note) is None
"""


def test_where_memory_files_may_not_be_so_large_it_is_nobody_elses(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", LIMITED, str(tmp_path)], check=True)


def _faults() -> int:
    return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[7])


@pytest.mark.parametrize(
    "note", ["", "{", "[]", '{"pid": 1}', '{"pid": "x", "file": 3, "name": "n"}', '{"pid": 1, "file": [], "name": 1}']
)
def test_a_note_that_makes_no_sense_is_none(note: str, tmp_path: Path) -> None:
    path = note_path(tmp_path, "w0.1")
    assert NeighbourBuffer.find(path) is None
    path.parent.mkdir()
    path.write_text(note)
    assert NeighbourBuffer.find(path) is None


def test_a_descriptor_that_is_something_else_by_now_is_none(held: SaveBuffer, tmp_path: Path) -> None:
    held.make(4096, in_a_hurry=NOT_IN_A_HURRY)
    path = note_path(tmp_path, "w0.1")
    said = json.loads(path.read_text())
    other = os.memfd_create("another")
    try:
        path.write_text(json.dumps({**said, "file": other}))
        assert NeighbourBuffer.find(path) is None
    finally:
        os.close(other)
    path.write_text(json.dumps(said))
    neighbour_of(tmp_path)
    held.close()
    assert NeighbourBuffer.find(path) is None


def test_parts_are_never_of_two_saves(held: SaveBuffer, tmp_path: Path) -> None:
    """The owner copies one save after the other while a neighbour reads, which gets what it asked for, or nothing."""
    buffer = held.make(SIZE, in_a_hurry=NOT_IN_A_HURRY)
    neighbour, image = neighbour_of(tmp_path), torch.zeros(SIZE, dtype=torch.uint8)
    copied = 0

    def copy() -> None:
        nonlocal copied
        for mark in range(1, 501):
            held.begin()
            buffer.fill_(mark % 251)
            held.done(mark)
            copied = mark

    owner = threading.Thread(target=copy)
    owner.start()
    while owner.is_alive():
        mark = copied
        if neighbour.read(mark, 0, image):
            assert bool((image == mark % 251).all()), f"of save {mark}, and of another"
    assert neighbour.read(500, 0, image)


OWNER = """
import sys
from pathlib import Path
from holdfast.checkpoint.saving.save_buffer import SaveBuffer, note_path
held = SaveBuffer(note_path(Path(sys.argv[1]), "w0.1"))
buffer = held.make(1 << 20, in_a_hurry=lambda: False)
print("made", flush=True)
for line in sys.stdin:
    if line.strip() == "begin":
        held.begin()
        buffer[: 1 << 19] = 5
    else:
        buffer[:] = 5
        held.done(77)
    print("so", flush=True)
"""


@pytest.mark.parametrize("stage", ["made", "begin", "done"])
def test_what_a_killed_owner_had_copied_is_there(stage: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(OWNER), str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdin is not None and owner.stdout is not None
        assert owner.stdout.readline() == "made\n"
        neighbour, image = neighbour_of(tmp_path), torch.zeros(1 << 20, dtype=torch.uint8)
        for word in [] if stage == "made" else ["begin"] if stage == "begin" else ["begin", "done"]:
            print(word, file=owner.stdin, flush=True)
            assert owner.stdout.readline() == "so\n"
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    assert NeighbourBuffer.find(note_path(tmp_path, "w0.1")) is None, "only who had it open before has it still"
    assert neighbour.wait(77, 0.05) == (stage == "done")
    assert neighbour.read(77, 0, image) == (stage == "done")
    assert bool((image == 5).all()) == (stage == "done")
    neighbour.close()
