"""Reading another host's memory over a connection: what is asked, what is answered, and what is refused."""

from __future__ import annotations

import json
import random
import shutil
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import xxhash

from holdfast.checkpoint.saving.writing import write_state
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.core.errors import IntegrityError, NotStored, PeerError, StorageUnavailable
from holdfast.engine.transfer import memory_desk
from holdfast.engine.transfer.memory_desk import RemoteMemory, serve_memory
from holdfast.engine.transfer.recalling import PATIENCE_S, Recaller
from holdfast.net.byte_ranges import Request, Status
from holdfast.net.wires import SocketWires
from holdfast.trust.keys import Keys

from .conftest import snapshot_of

NAME = "checkpoint-000000000007/part-0000-00000000000000000000000000000000.safetensors"
SECRET = b"not for anyone"


class Desk:
    """A host's memory, a desk that serves it, and every connection's end."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ends: list[BaseException | None] = []
        self._threads: list[threading.Thread] = []

    def dial(self) -> socket.socket:
        near, far = socket.socketpair()
        near.settimeout(10.0)

        def serve() -> None:
            with far:
                try:
                    serve_memory(far, self.root)
                    self.ends.append(None)
                except BaseException as error:
                    self.ends.append(error)

        thread = threading.Thread(target=serve, daemon=True)
        self._threads.append(thread)
        thread.start()
        return near

    def wait(self) -> None:
        for thread in self._threads:
            thread.join(10.0)
            assert not thread.is_alive(), "a connection is still served"


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    root = tmp_path / "memory"
    (root / NAME).parent.mkdir(parents=True)
    (root / NAME).write_bytes(random.Random(1).randbytes(3_000_001))
    (root / "checkpoint-000000000007" / "manifest.json").write_bytes(b"{}")
    (root / "run.json").write_bytes(SECRET)
    (tmp_path / "secret").write_bytes(SECRET)
    (root / "checkpoint-000000000007" / "link").symlink_to(tmp_path / "secret")
    made = Desk(root)
    yield made
    made.wait()


def request(sock: socket.socket, body: bytes) -> bytes:
    """What comes back until the desk hangs up."""
    sock.sendall(struct.pack(">I", len(body)) + body)
    sock.shutdown(socket.SHUT_WR)
    answer = b""
    while more := sock.recv(1 << 16):
        answer += more
    return answer


def test_what_is_there_is_listed_and_read(desk: Desk) -> None:
    memory = RemoteMemory("beta", desk.dial)
    local = LocalStorage(desk.root)
    assert [entry for entry in local.list("checkpoint-") if "link" not in entry.name] == [
        entry for entry in memory.list("checkpoint-") if "link" not in entry.name
    ]
    content = (desk.root / NAME).read_bytes()
    assert memory.read(NAME, 4_000_000) == content
    for offset, length in ((0, 1), (0, len(content)), (1, 2_000_000), (len(content) - 1, 1), (5, 0)):
        found = bytearray(length)
        memory.read_into(NAME, memoryview(found), offset)
        assert found == content[offset : offset + length]
    memory.close()
    desk.wait()
    assert desk.ends == [None], "one connection was enough, and it ended well"


def test_several_threads_have_connections_of_their_own(desk: Desk) -> None:
    memory = RemoteMemory("beta", desk.dial)
    content = (desk.root / NAME).read_bytes()
    failures: list[str] = []
    together = threading.Barrier(4)

    def read(seed: int) -> None:
        chance = random.Random(seed)
        together.wait()
        for _ in range(25):
            start = chance.randrange(len(content))
            found = bytearray(chance.randrange(len(content) - start))
            memory.read_into(NAME, memoryview(found), start)
            if found != content[start : start + len(found)]:
                failures.append(f"seed {seed}")

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    memory.close()
    assert not failures


def test_what_is_not_there_or_too_short_is_said_and_the_connection_goes_on(desk: Desk) -> None:
    memory = RemoteMemory("beta", desk.dial)
    with pytest.raises(NotStored, match="memory of beta"):
        memory.read("checkpoint-000000000008/manifest.json", 1000)
    with pytest.raises(IntegrityError, match="fewer than"):
        memory.read_into(NAME, memoryview(bytearray(10)), 3_000_000)
    assert memory.read("checkpoint-000000000007/manifest.json", 1000) == b"{}"
    with pytest.raises(StorageUnavailable, match="an answer of 3000001 bytes"):
        memory.read(NAME, 1000)
    memory.close()
    desk.wait()


@pytest.mark.parametrize(
    "name",
    [
        "run.json",
        "../secret",
        "checkpoint-000000000007/../../secret",
        "checkpoint-000000000007/../run.json",
        "/etc/hostname",
        "checkpoint-000000000007/.hidden",
        "checkpoint-000000000007/link",
        "checkpoint-000000000007",
        "",
        None,
        7,
        ["checkpoint-000000000007/manifest.json"],
    ],
    ids=str,
)
def test_nothing_else_is_ever_read(desk: Desk, name: object) -> None:
    with desk.dial() as sock:
        answer = request(sock, json.dumps({"name": name, "start": 0, "stop": None}).encode())
    assert SECRET not in answer
    assert not answer or answer[0] != Status.OK


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[]",
        b"\xff\xfe",
        b"[" * 4000,
        b'{"name":"write","start":0,"stop":null}',
        b'{"name":["listing"],"start":0,"stop":null}',
        json.dumps({"name": NAME}).encode(),
        json.dumps({"name": NAME, "start": -1, "stop": 5}).encode(),
        json.dumps({"name": NAME, "start": 5, "stop": 0}).encode(),
        json.dumps({"name": NAME, "start": 0, "stop": 10**30}).encode(),
        json.dumps({"name": NAME, "start": 10**30, "stop": None}).encode(),
        json.dumps({"name": NAME, "start": True, "stop": 1.5}).encode(),
    ],
    ids=range(13),
)
def test_garbage_ends_its_own_connection_at_most(desk: Desk, body: bytes) -> None:
    with desk.dial() as sock:
        answer = request(sock, body)
    desk.wait()
    assert len(answer) < 2000 and (not answer or answer[0] != Status.OK)
    assert all(end is None or isinstance(end, PeerError) for end in desk.ends), desk.ends


def test_random_bytes_end_their_own_connection_at_most(desk: Desk) -> None:
    chance = random.Random(5)
    for _ in range(50):
        with desk.dial() as sock:
            try:
                sock.sendall(chance.randbytes(chance.randrange(1, 10_000)))
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(1 << 16):
                    pass
            except OSError:
                pass  # it hung up first
    desk.wait()
    assert all(end is None or isinstance(end, PeerError) for end in desk.ends), desk.ends


def test_a_reader_that_does_not_read_is_given_up(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_desk, "STALL_S", 0.2)
    with desk.dial() as sock:
        sock.sendall(Request(NAME).encode())
        desk.wait()
    assert isinstance(desk.ends[0], PeerError)


Answer = Callable[[socket.socket], None]


def answer(data: bytes) -> Answer:
    whole = struct.pack(">BQ", 0, len(data)) + data + xxhash.xxh3_128_digest(data)
    return lambda sock: sock.sendall(whole)


LIES: dict[str, Answer] = {
    "nothing": lambda sock: None,
    "half an answer": lambda sock: sock.sendall(struct.pack(">BQ", 0, 100) + b"x" * 50),
    "too much": lambda sock: sock.sendall(struct.pack(">BQ", 0, 1 << 60)),
    "a status that is none": lambda sock: sock.sendall(struct.pack(">BQ", 9, 5) + b"12345"),
    "a refusal without end": lambda sock: sock.sendall(struct.pack(">BQ", 2, 1 << 60)),
    "no listing": answer(b"{}"),
    "names that are none": answer(b'[["../a", 1]]'),
    "sizes that are none": answer(b'[["a", "1"  ]]'),
    "rows that are none": answer(b"[1, 2]"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_host_that_answers_nonsense_is_as_good_as_gone(lie: str) -> None:
    near, far = socket.socketpair()

    def lying() -> None:
        with far:
            far.recv(1 << 16)
            LIES[lie](far)

    thread = threading.Thread(target=lying)
    thread.start()
    memory = RemoteMemory("beta", lambda: near)
    try:
        with pytest.raises(StorageUnavailable, match="memory of beta"):
            memory.list()
    finally:
        thread.join()
        memory.close()
        near.close()


def test_nobody_there_is_no_memory() -> None:
    def refuse() -> socket.socket:
        raise PeerError("nobody answers")

    memory = RemoteMemory("beta", refuse)
    assert not memory.is_there()
    with pytest.raises(StorageUnavailable, match="nobody answers"):
        memory.list()


def test_hosts_whose_agents_live_are_waited_for_but_not_for_ever(tmp_path: Path) -> None:
    """A run of three hosts with a code: this one's worker is there first, and has too little by itself."""
    now = 100.0
    here = {"w0.2@alpha"}
    agents = frozenset({"alpha", "beta", "gamma"})
    root = tmp_path / "memory"
    recaller = Recaller(
        root,
        me="w0.2@alpha",
        wires=SocketWires("alpha", Keys.from_secret(bytes(32))),
        who=lambda: ({}, agents - ({"beta"} if "w0.2@beta" in here else set())),
        clock=lambda: now,
    )
    storage = recaller.gather()
    assert storage.uri == "memory of alpha"
    assert recaller.missing(storage, at_least=-1) == ["alpha", "beta", "gamma"]
    now += PATIENCE_S - 1
    here.add("w0.2@beta")
    assert recaller.missing(storage, at_least=-1) == ["alpha", "gamma"]
    now += 2
    assert recaller.missing(storage, at_least=-1) == []


def test_a_whole_snapshot_that_is_new_enough_is_not_kept_waiting(tmp_path: Path) -> None:
    root = tmp_path / "memory"
    write_state(LocalStorage(root), snapshot_of({"a": torch.ones(3)}, 7), created_s=0.0)
    recaller = Recaller(
        root,
        me="w0.2@alpha",
        wires=SocketWires("alpha", Keys.from_secret(bytes(32))),
        who=lambda: ({}, frozenset({"beta"})),
        clock=lambda: 0.0,
    )
    storage = recaller.gather()
    assert recaller.missing(storage, at_least=7) == []
    assert recaller.missing(storage, at_least=8) == ["beta"], "storage has a newer one, and so may beta"
    begun = root / "checkpoint-000000000009"
    begun.mkdir()
    shutil.copy(next((root / "checkpoint-000000000007").glob("part-*")), begun)
    assert recaller.missing(recaller.gather(), at_least=7) == ["beta"], "a newer step was begun: beta may have the rest"
