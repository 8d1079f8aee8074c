"""Storage in a directory: the contract, disks that are full, read-only or odd, and what dead writers leave behind."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from holdfast.checkpoint.storage import local
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.checkpoint.storage.port import Stored
from holdfast.core.errors import NotStored, StorageRefused, StorageUnavailable

from .storage_contract import (
    MIB,
    Child,
    SharedStorageContract,
    StorageContract,
    aligned,
    filled,
    noise,
    unaligned,
    write,
)

IMPORT = "import sys; from holdfast.checkpoint.storage.local import LocalStorage; s = LocalStorage(sys.argv[1])"
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")


class TestLocalStorage(SharedStorageContract):
    @pytest.fixture
    def storage(self, tmp_path: Path) -> LocalStorage:
        return LocalStorage(tmp_path / "made when needed" / "checkpoints")


class TestLocalStorageWithoutADisk(StorageContract):
    """A file system without blocks, where direct writing means something else."""

    @pytest.fixture
    def storage(self) -> Iterator[LocalStorage]:
        directory = Path(f"/dev/shm/holdfast-test-{os.getpid()}-{time.monotonic_ns()}")
        yield LocalStorage(directory)
        shutil.rmtree(directory, ignore_errors=True)


def everything_in(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


@contextmanager
def mounted(directory: Path, *arguments: str) -> Iterator[None]:
    done = subprocess.run(["mount", *arguments, str(directory)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"mount: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


# -- full


@pytest.fixture(params=["tmpfs", "ext4"])
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A real file system of 32 MiB."""
    directory = tmp_path / "disk"
    directory.mkdir()
    with ExitStack() as stack:
        if request.param == "tmpfs":
            stack.enter_context(mounted(directory, "-t", "tmpfs", "-o", "size=32m", "none"))
        else:
            if shutil.which("mkfs.ext4") is None:
                pytest.skip("mkfs.ext4 is not installed (Debian: e2fsprogs)")
            image = tmp_path / "image"
            with image.open("wb") as file:
                file.truncate(32 * MIB)
            subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], check=True)
            stack.enter_context(mounted(directory, "-o", "loop", str(image)))
        yield directory


@needs_root
@pytest.mark.parametrize("memory", [aligned, unaligned])
def test_a_full_disk_harms_nothing(small_disk: Path, memory: Callable[[int], memoryview]) -> None:
    storage = LocalStorage(small_disk)
    committed = noise(4 * MIB)
    write(storage, "old/part", committed)
    large = filled(memory(64 * MIB), noise(64 * MIB))
    for name in ("old/part", "new/part"):
        with pytest.raises(StorageUnavailable, match=f"cannot write {small_disk}/{name}: the disk is full") as caught:
            storage.write(name, large)
        assert "free some space" in caught.value.hint
    room = shutil.disk_usage(small_disk).free - 100_000
    (small_disk / "filler").write_bytes(bytes(room))
    with pytest.raises(StorageUnavailable, match="the disk is full"):
        storage.write("old/part", large[: MIB - 1])  # too few bytes to be reserved beforehand
    with pytest.raises(StorageUnavailable, match="the disk is full"):
        storage.create("new/manifest.json", bytes(MIB - 1))
    assert storage.read("old/part", 4 * MIB) == committed
    assert everything_in(small_disk) == ["filler", "old/part"]
    assert storage.list() == [Stored("filler", room), Stored("old/part", 4 * MIB)]
    storage.delete("filler")
    storage.write("old/part", large[: 4 * MIB + 1])
    assert storage.create("new/manifest.json", bytes(MIB - 1))
    assert storage.read("old/part", 5 * MIB) == large[: 4 * MIB + 1]


def test_a_limit_of_file_sizes_is_a_clear_sentence(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    write(storage, "part", b"old")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3 * MIB, before[1]))
    try:
        for memory in (aligned(4 * MIB), unaligned(4 * MIB)):
            with pytest.raises(StorageRefused, match=r"part: larger files are not allowed\n  hint: raise the limit"):
                storage.write("part", memory)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert storage.read("part", 10) == b"old"
    assert everything_in(tmp_path) == ["part"]


# -- refused


@needs_root
def test_a_read_only_directory_can_be_read(tmp_path: Path) -> None:
    directory, view = tmp_path / "directory", tmp_path / "view"
    view.mkdir()
    write(LocalStorage(directory), "old/part", noise(2 * MIB))
    with mounted(view, "--bind", "-o", "ro", str(directory)):
        storage = LocalStorage(view)
        calls: tuple[Callable[[], object], ...] = (
            lambda: write(storage, "old/part", b"new"),
            lambda: write(storage, "new/part", b"new"),
            lambda: storage.create("old/manifest.json", b"new"),
            lambda: storage.delete("old/part"),
        )
        for call in calls:
            with pytest.raises(StorageRefused, match=f"cannot .* {view}/.*: the file system is read-only") as caught:
                call()
            assert "mount it for writing" in caught.value.hint
        assert storage.list() == [Stored("old/part", 2 * MIB)]
        assert storage.read("old/part", 2 * MIB) == noise(2 * MIB)
    assert everything_in(directory) == ["old/part"]


@needs_root
def test_a_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    """Root may do anything, so a process of somebody else tries."""
    directory = tmp_path / "mine"
    directory.mkdir(mode=0o700)
    code = (
        "import os, sys; os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "for call in (lambda: s.write('a', memoryview(b'x')), lambda: s.list(), lambda: s.read('a', 1)):\n"
        "    try: call()\n"
        "    except StorageRefused as error: print(error)\n"
    )
    program = f"from holdfast.core.errors import StorageRefused\n{IMPORT}\n{code}"
    tried = subprocess.run([sys.executable, "-c", program, str(directory)], capture_output=True, text=True)
    assert tried.stdout.count("no permission") == 3, tried


def test_a_file_where_the_directory_should_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        storage = LocalStorage(place)
        calls: tuple[Callable[[], object], ...] = (
            lambda storage=storage: write(storage, "a", b"x"),  # type: ignore[misc]
            lambda storage=storage: storage.create("a/b", b"x"),  # type: ignore[misc]
            lambda storage=storage: storage.list(),  # type: ignore[misc]
            lambda storage=storage: storage.read("a", 1),  # type: ignore[misc]
        )
        for call in calls:
            with pytest.raises(StorageRefused, match="a part of that path is a file"):
                call()
    storage = LocalStorage(tmp_path)
    write(storage, "directory/a", b"x")
    with pytest.raises(StorageRefused, match="there is a directory of that name"):
        write(storage, "directory", b"x")
    with pytest.raises(StorageRefused, match="a part of that path is a file"):
        write(storage, "file/a", b"x")
    with pytest.raises(NotStored):
        storage.read("file/a", 1)
    assert storage.list("file/") == []
    storage.delete("directory")
    storage.delete("file/a")
    assert everything_in(tmp_path) == ["directory/a", "file"]


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EDQUOT, errno.ETIMEDOUT, errno.ENOTCONN])
def test_what_may_pass_is_unavailable(number: int) -> None:
    with pytest.raises(StorageUnavailable, match=r"^cannot read /a/b: \w+"), local._named(Path("/a/b"), "read"):
        raise OSError(number, os.strerror(number))


# -- unfinished files


def test_what_a_dead_writer_left_goes_with_the_next_write(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    size = 256 * MIB
    with Child(str(tmp_path), "write", "a/part", str(size), "1") as child:
        child.hear("ready")
        child.go()
        child.hear("doing")
        deadline = time.monotonic() + 30
        while not everything_in(tmp_path):  # the file under a name of its own
            assert time.monotonic() < deadline
        child.kill()
        left = everything_in(tmp_path)
    assert left != ["a/part"] and len(left) == 1, "it was quicker than the kill"
    assert storage.list() == []
    write(storage, "b/part", b"elsewhere")
    assert everything_in(tmp_path) == [*left, "b/part"]
    write(storage, "a/other", b"x")
    assert everything_in(tmp_path) == ["a/other", "b/part"]


def test_unfinished_files_of_the_living_and_of_other_hosts_stay(tmp_path: Path) -> None:
    place = local.place_mark()
    living = f".holdfast-{place}-{os.getpid()}-00000000"
    foreign = ".holdfast-0000000000000000-999999999-00000000"
    dead = f".holdfast-{place}-999999999-00000000"
    aged = ".holdfast-0000000000000000-999999999-00000001"
    other = ".somebody-elses"
    for name in (living, foreign, dead, aged, other):
        (tmp_path / name).write_bytes(b"half")
    old = time.time() - local.UNFINISHED_AGE_MAX_S - 60
    for name in (aged, other):
        os.utime(tmp_path / name, (old, old))
    storage = LocalStorage(tmp_path)
    assert storage.list() == []
    write(storage, "a", b"x")
    assert everything_in(tmp_path) == sorted([living, foreign, other, "a"])


def test_a_deleted_checkpoint_leaves_no_directory(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "root")
    for name in ("one/deep/a", "one/b", "two/c"):
        write(storage, name, b"x")
    (tmp_path / "root" / "one" / f".holdfast-{local.place_mark()}-999999999-00000000").write_bytes(b"half")
    for name in ("one/deep/a", "one/b"):
        storage.delete(name)
    assert sorted(path.name for path in (tmp_path / "root").iterdir()) == ["two"]
    storage.delete("two/c")
    assert list((tmp_path / "root").iterdir()) == []  # the directory that the user named stays


def test_writers_and_deleters_do_not_meet(tmp_path: Path) -> None:
    """A directory that is removed as empty while another writer is about to use it is made again."""
    storage = LocalStorage(tmp_path)

    def work(worker: int) -> None:
        for number in range(40):
            write(storage, f"same/deep/{worker}", b"%d" % number)
            assert storage.read(f"same/deep/{worker}", 10) == b"%d" % number
            storage.delete(f"same/deep/{worker}")

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert list(tmp_path.iterdir()) == []


# -- the way to the disk


@pytest.mark.skipif(shutil.which("fincore") is None, reason="fincore is not installed (Debian: util-linux-extra)")
def test_large_files_go_past_the_cache(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    size = 20 * MIB + 5

    def resident(name: str) -> int:
        command = ["fincore", "--bytes", "--noheadings", "--output", "RES", str(tmp_path / name)]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    (tmp_path / "cached").write_bytes(noise(size))
    assert resident("cached") >= size
    for memory in (aligned, unaligned):
        storage.write("direct", filled(memory(size), noise(size)))
        if resident("direct") >= size:
            pytest.skip("this file system writes nothing directly")
        assert resident("direct") <= 4096
    storage.read_into("direct", aligned(size))
    assert resident("direct") <= MIB  # the kernel reads a little ahead of the last few bytes


def test_relative_paths_stay_where_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    storage = LocalStorage("checkpoints")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    write(storage, "a", b"x")
    assert everything_in(tmp_path) == ["checkpoints/a"]
    assert storage.uri == "checkpoints"


def test_files_of_others_are_not_shown(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    (tmp_path / "with space").write_text("x")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "a").write_text("x")
    (tmp_path / "circle").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    write(storage, "a", b"x")
    assert storage.list() == [Stored("a", 1)]


def test_a_directory_that_only_a_dead_writer_knew_goes_with_the_next_commit(tmp_path: Path) -> None:
    """Killed in the first write of a step: nothing is listed there, and nobody would ever look again."""
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = tmp_path / "checkpoint-000000000007"
    left.mkdir()
    (left / f".holdfast-{local.place_mark()}-{dead.pid}-00000000").write_bytes(b"x" * 100)
    mine = tmp_path / "checkpoint-000000000008"
    mine.mkdir()
    (mine / f".holdfast-{local.place_mark()}-{os.getpid()}-00000000").write_bytes(b"x" * 100)
    storage = LocalStorage(tmp_path)
    assert storage.create("checkpoint-000000000009/manifest.json", b"{}")
    assert not left.exists() and mine.exists()
