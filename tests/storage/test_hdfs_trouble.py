"""Storage on HDFS when something is wrong: a DataNode dies in a write, the NameNode is away or silent, nobody may."""

from __future__ import annotations

import itertools
import mmap
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import pytest
from hdfs_native import Client, WriteOptions

from holdfast.checkpoint.storage import hdfs
from holdfast.checkpoint.storage.hdfs import HdfsStorage
from holdfast.checkpoint.storage.port import Stored
from holdfast.core.errors import NotStored, StorageRefused, StorageUnavailable
from tests.harness.hdfs_server import BLOCK_BYTES, HdfsCluster

pytestmark = pytest.mark.xdist_group("hdfs")

STEP_S = 6.0
WAIT_S = 60.0
MIB = 1 << 20
DAY_MS = 24 * 3600 * 1000
T = TypeVar("T")

_numbers = itertools.count()


@pytest.fixture
def storage(cluster: HdfsCluster) -> Iterator[HdfsStorage]:
    cluster.heal()
    storage = HdfsStorage(f"{cluster.uri}/runs/run-{next(_numbers)}", step_s=STEP_S)
    yield storage
    storage.close()


def root(storage: HdfsStorage) -> str:
    return "/runs" + storage.uri.partition("/runs")[2]


def put(client: Client, path: str, content: bytes = b"x") -> None:
    writer = client.create(path, WriteOptions(create_parent=True))
    writer.write(content)
    writer.close()


def files(client: Client, directory: str) -> list[str]:
    return [entry.path.rpartition("/")[2] for entry in client.list_status(directory, True) if not entry.isdir]


def until_available(call: Callable[[], T]) -> T:
    """As callers do: again, while trying again may help."""
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            return call()
        except StorageUnavailable:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def no_thread_is_left() -> None:
    """But for those that were given up, which are counted: the client may hang for ever when a DataNode dies."""

    def left() -> int:
        threads = [thread for thread in threading.enumerate() if thread.name == "holdfast-hdfs"]
        return len(threads) - sum(storage._stuck for storage in list(hdfs._storages))

    wait_until(lambda: left() <= 0)


def unavailable_within(seconds: float, call: Callable[[], object]) -> StorageUnavailable:
    started = time.monotonic()
    with pytest.raises(StorageUnavailable) as caught:
        call()
    assert time.monotonic() - started < seconds
    return caught.value


# -- processes that die


def test_a_datanode_dies_in_the_middle_of_a_write(cluster: HdfsCluster, storage: HdfsStorage) -> None:
    before, after = (bytes([fill]) * (200 * MIB) for fill in (1, 2))
    storage.write("replaced", memoryview(before[: 3 * MIB]))
    storage.write("other", memoryview(b"untouched"))
    with ThreadPoolExecutor(2) as threads:
        writes = [threads.submit(storage.write, name, memoryview(after)) for name in ("replaced", "new")]
        wait_until(lambda: cluster.being_written() > 4 * MIB)
        cluster.kill_datanode()
        killed = time.monotonic()
        for write in writes:
            with pytest.raises(StorageUnavailable):
                write.result(WAIT_S)
        assert time.monotonic() - killed < 5 * STEP_S
    no_thread_is_left()
    try:
        assert [stored.name for stored in storage.list()] == ["other", "replaced"]
        assert [stored.size for stored in storage.list()] == [9, 3 * MIB]
    finally:
        cluster.start_datanode()
    assert until_available(lambda: storage.read("replaced", 3 * MIB)) == before[: 3 * MIB]
    assert until_available(lambda: storage.read("other", 100)) == b"untouched"
    with pytest.raises(NotStored):
        storage.read("new", 10)
    until_available(lambda: storage.write("new", memoryview(after[: 20 * MIB])))
    assert storage.read("new", 20 * MIB) == after[: 20 * MIB]


def test_no_datanode_then_no_namenode_then_safe_mode(cluster: HdfsCluster, storage: HdfsStorage) -> None:
    storage.write("kept", memoryview(b"kept"))
    cluster.kill_datanode()
    try:
        unavailable_within(5 * STEP_S, lambda: storage.read("kept", 10))
        cluster.kill_namenode()
        calls: tuple[Callable[[], object], ...] = (
            lambda: storage.list(),
            lambda: storage.create("new", b"new"),
            lambda: storage.delete("kept"),
        )
        for call in calls:
            assert "refused" in unavailable_within(STEP_S, call).message
        cluster.start_namenode()  # and no DataNode reports to it
        error = unavailable_within(STEP_S, lambda: storage.write("new", memoryview(b"new")))
        assert "safe mode" in error.message and error.hint
        assert storage.list() == [Stored("kept", 4)]
    finally:
        cluster.start_datanode()
    assert until_available(lambda: storage.read("kept", 10)) == b"kept"
    storage.write("new", memoryview(b"new"))
    assert storage.list() == [Stored("kept", 4), Stored("new", 3)]


# -- processes that are silent


def test_a_silent_namenode_is_given_up(
    cluster: HdfsCluster, storage: HdfsStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick = HdfsStorage(storage.uri, step_s=1.0)
    until_available(lambda: quick.write("kept", memoryview(b"kept")))
    no_thread_is_left()
    monkeypatch.setattr(hdfs, "STUCK_MAX", 3)
    memory = mmap.mmap(-1, 3 * MIB)
    cluster.freeze_namenode()
    try:
        with memoryview(memory) as view, view[:4] as few:
            unavailable_within(5.0, lambda: quick.write("late", view))
            unavailable_within(5.0, lambda: quick.read_into("kept", few))
        unavailable_within(5.0, quick.list)
        assert "still without" in unavailable_within(0.5, lambda: quick.read("kept", 10)).message
    finally:
        cluster.thaw_namenode()
    assert until_available(lambda: quick.read("kept", 10)) == b"kept"
    wait_until(lambda: not quick._stuck)
    assert memory[:4] == bytes(4), "written by a thread that was left alone"
    memory.close()  # raises while anybody holds a view of it
    assert files(Client(cluster.uri), root(storage)) == ["kept"], "a write that was given up went on"
    quick.close()


def test_a_silent_datanode_is_given_up(cluster: HdfsCluster, storage: HdfsStorage) -> None:
    content = bytes(range(256)) * 4096
    storage.write("a", memoryview(content))
    memory = mmap.mmap(-1, len(content))
    cluster.freeze_datanode()
    try:
        with memoryview(memory) as view:
            unavailable_within(4 * STEP_S, lambda: storage.read_into("a", view))
        memory.close()
    finally:
        cluster.thaw_datanode()
    assert until_available(lambda: storage.read("a", len(content))) == content
    until_available(lambda: storage.write("b", memoryview(content)))


# -- what a dead writer leaves


def test_leftovers_are_hidden_and_go_after_a_day(cluster: HdfsCluster, storage: HdfsStorage) -> None:
    client = Client(cluster.uri)
    storage.write("old/part", memoryview(b"x"))
    for directory in ("old", "abandoned", "young"):
        put(client, f"{root(storage)}/{directory}/.holdfast-{'0' * 16}")
    now_ms = client.get_file_info(f"{root(storage)}/young").modification_time
    for directory in ("old", "abandoned"):
        path = f"{root(storage)}/{directory}/.holdfast-{'0' * 16}"
        client.set_times(path, now_ms - DAY_MS - 60_000, now_ms)
    assert storage.list() == [Stored("old/part", 1)]
    assert sorted(entry.path[len(root(storage)) :] for entry in client.list_status(root(storage), True)) == [
        "/old",
        "/old/part",
        "/young",
        f"/young/.holdfast-{'0' * 16}",
    ]


def test_deleting_the_last_name_removes_its_directories(cluster: HdfsCluster, storage: HdfsStorage) -> None:
    for name in ("a/b/1", "a/b/2"):
        storage.write(name, memoryview(b"x"))
    for name in ("a/b/1", "a/b/2"):
        storage.delete(name)
    assert list(Client(cluster.uri).list_status(root(storage), True)) == []


# -- what must not be lost


def test_every_block_is_flushed(cluster: HdfsCluster, storage: HdfsStorage) -> None:
    for blocks, size in ((1, MIB), (2, 2 * BLOCK_BYTES), (3, 2 * BLOCK_BYTES + MIB)):
        before = cluster.flushes()
        storage.write("a", memoryview(bytes(size)))
        wait_until(lambda before=before, blocks=blocks: cluster.flushes() >= before + blocks)  # type: ignore[misc]


def test_a_rename_whose_answer_was_lost_is_no_defeat(cluster: HdfsCluster, storage: HdfsStorage) -> None:
    client = Client(cluster.uri)
    mine, other, name = (f"{root(storage)}/{part}" for part in (".holdfast-1", ".holdfast-2", "name"))
    put(client, mine)
    client.rename(mine, name)  # and the client, which heard nothing, asks again
    assert hdfs._renamed(client, mine, name, overwrite=False)
    assert hdfs._renamed(client, mine, name, overwrite=True)
    put(client, other)
    assert not hdfs._renamed(client, other, name, overwrite=False)
    client.delete(name)
    with pytest.raises(StorageUnavailable, match="removed"):
        hdfs._renamed(client, mine, name, overwrite=True)


# -- nobody may


def test_without_permission_it_is_refused(
    cluster: HdfsCluster, storage: HdfsStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = Client(cluster.uri)
    storage.write("a", memoryview(b"mine"))
    client.set_permission(root(storage), 0o700)
    monkeypatch.setenv("HADOOP_USER_NAME", "stranger")
    stranger = HdfsStorage(storage.uri, step_s=STEP_S)
    calls: tuple[Callable[[], object], ...] = (
        lambda: stranger.write("b", memoryview(b"theirs")),
        lambda: stranger.write("a", memoryview(b"theirs")),
        lambda: stranger.create("b", b"theirs"),
        lambda: stranger.read("a", 10),
        lambda: stranger.list(),
        lambda: stranger.delete("a"),
    )
    for call in calls:
        with pytest.raises(StorageRefused, match="stranger") as caught:
            call()
        assert "HADOOP_USER_NAME" in caught.value.hint
        assert "\n\tat" not in caught.value.message
    monkeypatch.delenv("HADOOP_USER_NAME")
    assert storage.read("a", 10) == b"mine"
    assert files(client, root(storage)) == ["a"]


def test_a_file_in_the_way_is_refused(storage: HdfsStorage) -> None:
    storage.write("file", memoryview(b"x"))
    storage.write("directory/file", memoryview(b"x"))
    for name in ("file/below", "directory"):
        with pytest.raises(StorageRefused):
            storage.write(name, memoryview(b"y"))
        with pytest.raises(NotStored):
            storage.read(name, 10)
    storage.delete("directory")
    storage.delete("file/below")
    assert storage.list() == [Stored("directory/file", 1), Stored("file", 1)]


# -- other ways there


def test_a_nameservice_of_the_configuration(
    cluster: HdfsCluster, storage: HdfsStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    storage.write("a", memoryview(b"there"))
    settings = {
        "fs.defaultFS": "hdfs://ours",
        "dfs.ha.namenodes.ours": "dead,alive",
        "dfs.namenode.rpc-address.ours.dead": "127.0.0.1:1",
        "dfs.namenode.rpc-address.ours.alive": cluster.uri.removeprefix("hdfs://"),
    }
    rows = "".join(f"<property><name>{k}</name><value>{v}</value></property>" for k, v in settings.items())
    (tmp_path / "hdfs-site.xml").write_text(f"<configuration>{rows}</configuration>")
    (tmp_path / "core-site.xml").write_text("<configuration/>")
    monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    for uri in (f"hdfs://ours{root(storage)}", f"hdfs://{root(storage)}"):
        there = HdfsStorage(uri, step_s=STEP_S)
        assert there.read("a", 10) == b"there"
        there.close()


def test_a_forked_child_has_a_client_of_its_own(storage: HdfsStorage) -> None:
    """The child begins while connections of its parent are still kept, and ends as processes do, freeing all."""
    script = """
        import os, sys
        from holdfast.checkpoint.storage.hdfs import HdfsStorage
        storage = HdfsStorage(sys.argv[1], step_s=20.0)
        storage.write("parent", memoryview(bytes(100_000)))
        assert storage.read("parent", 100_000) == bytes(100_000)
        child = os.fork()
        if child == 0:
            assert storage.read("parent", 100_000) == bytes(100_000)
            storage.write("child", memoryview(b"child"))
            sys.exit(7)
        assert os.waitpid(child, 0)[1] == 7 << 8
        assert storage.read("child", 10) == b"child"
        print("both")
    """
    command = [sys.executable, "-c", textwrap.dedent(script), storage.uri]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert (done.stdout, done.returncode) == ("both\n", 0), done.stderr
