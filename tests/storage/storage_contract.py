"""What every storage must do. An implementation runs all of it by deriving from one of two classes:

    class TestLocal(SharedStorageContract):
        @pytest.fixture
        def storage(self, ...): ...        # a Storage on an empty directory

StorageContract uses the storage from this process alone. SharedStorageContract adds other processes, which race and
are killed; they open the same place with `open_storage(storage.uri)`, under this process's environment.
"""

from __future__ import annotations

import mmap
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import pytest

from holdfast.checkpoint.storage.port import Storage, Stored
from holdfast.core.errors import ConfigError, IntegrityError, NotStored, StorageUnavailable

WAIT_S = 30.0  # for what should take a fraction of a second, on a machine that is busy
MIB = 1 << 20
SIZES = (0, 1, 4095, 4096, 4097, 3 * MIB + 5, 20 * MIB)
ODD_NAMES = ("", "/", "/a", "a/", "a//b", "..", "../a", "a/../b", "a/..", ".", "a/./b", ".a", "a/.b", "a b", "a\nb")
ODDER_NAMES = (
    "a\0b",
    "a\\b",
    "a%2Fb",
    "a?b",
    "a#b",
    "ä",
    "*",
    "~",
    "a/~",
    "x" * 256,
    "a/" * 600 + "a",
    "/".join("abcdefghi"),
)


def aligned(size: int) -> memoryview:
    """Memory whose address is a multiple of 4096, like that of a worker's arena."""
    return memoryview(mmap.mmap(-1, max(size, 1)))[:size]


def unaligned(size: int) -> memoryview:
    return memoryview(mmap.mmap(-1, size + 1))[1:]


def noise(size: int, seed: int = 0) -> bytes:
    return random.Random(size + seed).randbytes(size)


def filled(memory: memoryview, content: bytes) -> memoryview:
    memory[:] = content
    return memory


def write(storage: Storage, name: str, content: bytes) -> None:
    storage.write(name, memoryview(content))


def names(stored: list[Stored]) -> list[str]:
    return [one.name for one in stored]


class StorageContract:
    @pytest.fixture
    def storage(self) -> Storage:
        raise NotImplementedError

    # -- bytes

    @pytest.mark.parametrize("memory", [aligned, unaligned])
    @pytest.mark.parametrize("size", SIZES)
    def test_what_is_written_can_be_read(
        self, storage: Storage, size: int, memory: Callable[[int], memoryview]
    ) -> None:
        content = noise(size)
        storage.write("part", filled(memory(size), content))
        assert storage.read("part", size) == content
        into = memory(size)
        storage.read_into("part", into)
        assert into == content
        assert storage.list() == [Stored("part", size)]

    def test_memory_that_cannot_be_written_can_be_stored(self, storage: Storage) -> None:
        storage.write("a", memoryview(b"constant"))
        assert storage.read("a", 100) == b"constant"

    def test_what_is_written_can_change_afterwards(self, storage: Storage) -> None:
        memory = filled(aligned(2 * MIB), noise(2 * MIB))
        storage.write("a", memory)
        memory[:] = bytes(2 * MIB)
        assert storage.read("a", 2 * MIB) == noise(2 * MIB)

    @pytest.mark.parametrize("before, after", [(3 * MIB + 5, 10), (10, 3 * MIB + 5), (4096, 0), (7, 7)])
    def test_writing_replaces_whatever_was_there(self, storage: Storage, before: int, after: int) -> None:
        write(storage, "a/b", noise(before))
        write(storage, "a/b", noise(after, seed=1))
        assert storage.read("a/b", after) == noise(after, seed=1)
        assert storage.list() == [Stored("a/b", after)]

    def test_any_range_can_be_read(self, storage: Storage) -> None:
        size = 9 * MIB + 3
        content = noise(size)
        write(storage, "a", content)
        for offset in (0, 1, 4095, 4096, 5 * MIB, size - 1, size):
            for length in (0, 1, 4096, 100_000, 3 * MIB, size):
                length = min(length, size - offset)
                for memory in (aligned(length), unaligned(length)):
                    storage.read_into("a", memory, offset)
                    assert memory == content[offset : offset + length], (offset, length)

    @pytest.mark.parametrize("size", [0, 1, 4096, 2 * MIB + 1])
    def test_a_short_file_is_noticed(self, storage: Storage, size: int) -> None:
        write(storage, "a", noise(size))
        for length, offset in ((size + 1, 0), (1, size), (size + 4096, 0), (3 * MIB, 0), (size, 1), (1, 5 * MIB)):
            if length:
                with pytest.raises(IntegrityError, match="a"):
                    storage.read_into("a", aligned(length), offset)

    @pytest.mark.parametrize("size", [1, 4097, 2 * MIB])
    def test_a_long_file_is_noticed(self, storage: Storage, size: int) -> None:
        write(storage, "a", noise(size))
        with pytest.raises(IntegrityError, match="a"):
            storage.read("a", size - 1)
        assert storage.read("a", size) == noise(size)

    # -- names

    def test_what_was_never_written_is_not_stored(self, storage: Storage) -> None:
        def nothing_there() -> None:
            for name in ("none", "some/none", "some/one/below"):
                with pytest.raises(NotStored, match=name):
                    storage.read(name, 100)
                with pytest.raises(NotStored, match=name):
                    storage.read_into(name, aligned(10))
            with pytest.raises(NotStored):
                storage.read("some", 100)  # a directory at most

        nothing_there()
        write(storage, "some/other", b"x")
        nothing_there()

    def test_deleting_removes_one_name(self, storage: Storage) -> None:
        for name in ("a/1", "a/11", "a/2/x", "b"):
            write(storage, name, b"x")
        storage.delete("a/1")
        storage.delete("a/1")
        storage.delete("nothing/there")
        assert names(storage.list()) == ["a/11", "a/2/x", "b"]
        with pytest.raises(NotStored):
            storage.read("a/1", 100)
        for name in ("a/11", "a/2/x"):
            storage.delete(name)
        assert names(storage.list()) == ["b"]
        write(storage, "a/1", b"again")
        assert storage.read("a/1", 100) == b"again"

    @pytest.mark.parametrize("number", range(len(ODD_NAMES + ODDER_NAMES)))
    def test_odd_names_are_refused_by_every_call(self, storage: Storage, number: int) -> None:
        name = (ODD_NAMES + ODDER_NAMES)[number]
        calls: tuple[Callable[[], object], ...] = (
            lambda: write(storage, name, b"x"),
            lambda: storage.create(name, b"x"),
            lambda: storage.read(name, 10),
            lambda: storage.read_into(name, aligned(1)),
            lambda: storage.delete(name),
        )
        for call in calls:
            with pytest.raises(ConfigError) as caught:
                call()
            assert caught.value.hint
        if name not in ("", "a/"):
            with pytest.raises(ConfigError):
                storage.list(name)
        assert storage.list() == []

    def test_a_list_is_sorted_and_starts_with_the_prefix(self, storage: Storage) -> None:
        assert storage.list() == storage.list("nothing/") == []
        sizes = {
            "checkpoint-000000000009/manifest.json": 5,
            "checkpoint-000000000010/manifest.json": 0,
            "checkpoint-000000000010/part-00000.safetensors": 4097,
            "checkpoint-000000000010/part-00001.safetensors": 1,
            "checkpoint-1/deep/er": 3,
            "checkpoint-10": 2,
            "latest": 1,
        }
        for name in reversed(sizes):
            write(storage, name, noise(sizes[name]))
        assert storage.list() == [Stored(name, sizes[name]) for name in sorted(sizes)]
        prefixes = (
            "c", "checkpoint-", "checkpoint-1", "checkpoint-1/", "checkpoint-1/deep", "checkpoint-10", "checkpoint-10/",
            "checkpoint-00000000001", "checkpoint-000000000010", "checkpoint-000000000010/",
            "checkpoint-000000000010/part-", "checkpoint-000000000010/part-00001.safetensors", "latest/", "x/y",
        )  # fmt: skip
        for prefix in prefixes:
            assert names(storage.list(prefix)) == sorted(name for name in sizes if name.startswith(prefix)), prefix

    def test_a_list_shows_every_write_that_returned(self, storage: Storage) -> None:
        def work(worker: int) -> None:
            for number in range(5):
                name = f"step-{number}/part-{worker}"
                write(storage, name, b"x" * number)
                assert Stored(name, number) in storage.list(f"step-{number}/")

        with ThreadPoolExecutor(8) as threads:
            list(threads.map(work, range(8)))
        assert len(storage.list()) == 40

    # -- create

    def test_create_makes_what_is_not_there(self, storage: Storage) -> None:
        assert storage.create("a/manifest.json", b"one")
        assert not storage.create("a/manifest.json", b"two")
        assert not storage.create("a/manifest.json", b"one")
        assert storage.read("a/manifest.json", 10) == b"one"
        write(storage, "a/other", b"there")
        assert not storage.create("a/other", b"new")
        assert storage.read("a/other", 10) == b"there"
        storage.delete("a/manifest.json")
        assert storage.create("a/manifest.json", b"")
        assert storage.list() == [Stored("a/manifest.json", 0), Stored("a/other", 5)]

    def test_one_of_eight_threads_creates(self, storage: Storage) -> None:
        for number in range(5):
            start = threading.Barrier(8)

            def race(worker: int, number: int = number, start: threading.Barrier = start) -> bool:
                start.wait(WAIT_S)
                return storage.create(f"race-{number}", b"worker %d" % worker)

            with ThreadPoolExecutor(8) as threads:
                won = list(threads.map(race, range(8)))
            assert won.count(True) == 1, won
            assert storage.read(f"race-{number}", 100) == b"worker %d" % won.index(True)

    def test_threads_may_all_write_one_name(self, storage: Storage) -> None:
        contents = [noise(MIB + worker, seed=worker) for worker in range(6)]
        with ThreadPoolExecutor(6) as threads:
            list(threads.map(lambda content: write(storage, "same", content), contents))
        assert storage.read("same", 2 * MIB) in contents
        assert names(storage.list()) == ["same"]

    def test_a_reader_sees_all_of_one_write(self, storage: Storage) -> None:
        contents = [bytes([fill]) * (2 * MIB) for fill in (1, 2)]
        write(storage, "a", contents[0])
        stop = threading.Event()
        looks = 0

        def look() -> None:
            nonlocal looks
            memory = aligned(2 * MIB)
            while not stop.is_set():
                try:
                    assert storage.read("a", 2 * MIB) in contents
                    storage.read_into("a", memory)
                except StorageUnavailable:
                    continue  # replaced under the reader, who may ask again
                assert memory in contents
                looks += 1

        with ThreadPoolExecutor(1) as threads:
            reader = threads.submit(look)
            try:
                deadline = time.monotonic() + WAIT_S
                number = 0
                while looks < 10 or number < 10:
                    assert time.monotonic() < deadline and not reader.done(), looks
                    number += 1
                    write(storage, "a", contents[number % 2])
            finally:
                stop.set()
            reader.result(WAIT_S)


class Child:
    """A process of storage_child.py that is ready to act."""

    def __init__(self, uri: str, *arguments: str) -> None:
        command = [sys.executable, str(Path(__file__).with_name("storage_child.py")), uri, *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for end in (self.process.stdin, self.process.stdout):
            assert end is not None
            try:
                end.close()
            except BrokenPipeError:
                pass

    def _end(self, end: IO[str] | None) -> IO[str]:
        assert end is not None
        return end

    def hear(self, word: str) -> str:
        line = self._end(self.process.stdout).readline().strip()
        assert line.startswith(word), f"the child says {line!r}, not {word!r}"
        return line.removeprefix(word).strip()

    def go(self) -> None:
        self._end(self.process.stdin).write("go\n")
        self._end(self.process.stdin).flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)

    def finished(self) -> bool:
        """Whether the last call had returned before it was killed."""
        return "done" in self._end(self.process.stdout).read()


class SharedStorageContract(StorageContract):
    kill_bytes = 64 * MIB  # long enough to be killed in the middle
    kill_at = (0.0, 0.1, 0.25, 0.4, 0.6, 0.8, 0.9, 0.95)  # of the time that a whole write took

    def test_another_process_reads_what_was_written(self, storage: Storage) -> None:
        with Child(storage.uri, "write", "a/part", str(2 * MIB), "7") as child:
            child.hear("ready")
            child.go()
            child.hear("doing")
            assert child.hear("done") == "None"
            assert storage.list("a/") == [Stored("a/part", 2 * MIB)]
            assert storage.read("a/part", 2 * MIB) == b"\x07" * (2 * MIB)

    def test_one_of_four_processes_creates(self, storage: Storage) -> None:
        with ExitStack() as stack:
            children = [stack.enter_context(Child(storage.uri, "create", "race", f"{i}")) for i in range(4)]
            for child in children:
                child.hear("ready")
            for child in children:
                child.go()
            for child in children:
                child.hear("doing")
            won = [child.hear("done") for child in children]
        assert sorted(won) == ["False"] * 3 + ["True"]
        assert storage.read("race", 10) == b"%d" % won.index("True")

    @pytest.mark.parametrize("replaces", [False, True], ids=["new name", "existing name"])
    def test_a_writer_killed_in_the_middle_leaves_no_half(self, storage: Storage, replaces: bool) -> None:
        size = self.kill_bytes
        old, new = (bytes([fill]) * size for fill in (1, 2))
        unfinished = 0
        memory = aligned(size)
        for fraction in self.kill_at:
            with Child(storage.uri, "write", "a/part", str(size), "1", "2") as child:
                child.hear("ready")
                child.go()
                child.hear("doing")
                started = time.monotonic()
                child.hear("done")
                whole_s = time.monotonic() - started
                if not replaces:
                    storage.delete("a/part")
                child.go()
                child.hear("doing")
                time.sleep(whole_s * fraction)  # where in the write it dies
                child.kill()
                finished = child.finished()
            there = storage.list()
            if there == [] and not replaces and not finished:
                unfinished += 1
                with pytest.raises(NotStored):
                    storage.read("a/part", size)
                continue
            assert there == [Stored("a/part", size)]
            storage.read_into("a/part", memory)
            content = old if memory == old else new
            assert memory == content, "a name with half the bytes"
            if finished:
                assert content is new, "a write that had returned is lost"
            elif content is old:
                assert replaces, "what was deleted is back"
                unfinished += 1
        assert unfinished, "every write was finished before the kill: nothing was tested"
        write(storage, "a/part", new)  # leftovers are in nobody's way
        assert storage.list() == [Stored("a/part", size)]
