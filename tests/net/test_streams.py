"""Groups and snapshots over TLS: the same bytes, the same errors, nobody waits for what is already decrypted."""

from __future__ import annotations

import os
import random
import select
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from holdfast.core.errors import PeerError
from holdfast.core.words import View
from holdfast.membership.codec import decode, encode
from holdfast.membership.messages import Done, Ready
from holdfast.net.byte_ranges import Request
from holdfast.net.groups import BrokenGroup, Connection, Gone, Group, Said
from holdfast.state.codec import flatten, pack_tree
from holdfast.state.snapshot import Snapshot
from holdfast.state.transfer import fetch, serve
from holdfast.trust.keys import Keys

WAIT_S = 20.0


def pair(keys: Keys) -> tuple[socket.socket, socket.socket]:
    """Both ends of a TLS connection over loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    client, accepting = keys.client_context(), keys.server_context()
    assert client is not None and accepting is not None
    with ThreadPoolExecutor(1) as pool:
        wrapping = pool.submit(accepting.wrap_socket, far, server_side=True)
        return client.wrap_socket(near), wrapping.result(WAIT_S)


@pytest.fixture
def groups(keys: Keys) -> Iterator[tuple[Group, Group]]:
    view = View(1, ("a", "b"))
    one, other = Group(view, "a", decode), Group(view, "b", decode)
    near, far = pair(keys)
    one.add(Connection("b", near))
    other.add(Connection("a", far))
    yield one, other
    one.close()
    other.close()


def listen(group: Group, count: int) -> list[Said | Gone]:
    """What comes in until there are `count` news; no poll is allowed to wait in vain."""
    news: list[Said | Gone] = []
    deadline = time.monotonic() + WAIT_S
    while len(news) < count and time.monotonic() < deadline:
        news += group.poll(0.2)
    return news


def quiet() -> str:
    return ""


def test_frames_of_all_sizes_arrive_in_order(groups: tuple[Group, Group]) -> None:
    one, other = groups
    steps = []
    for step, size in enumerate((0, 10, 5_000, 16_384, 70_000, 300_000, 3)):
        assert one.send("b", encode(Ready(step, tuple(range(3))), {"n": "x" * size})) is None
        steps.append(step)
    with ThreadPoolExecutor(1) as pool:
        flushing = pool.submit(listen, one, 1)  # it sends the rest while it waits for the answer
        news = listen(other, len(steps))
        other.send("a", encode(Done(9)))
        assert [item.message.step for item in flushing.result(WAIT_S) if isinstance(item, Said)] == [9]
    assert [item.message.step for item in news if isinstance(item, Said)] == steps


@pytest.mark.parametrize("seed", range(6))
def test_bulk_data_cut_differently_at_each_end(groups: tuple[Group, Group], seed: int) -> None:
    """Views that end in the middle of a record: what is decrypted and not asked for is found without a poll."""
    chance = random.Random(seed)
    size = chance.choice([1, 1000, 40_000, 3_000_000])
    sent = {name: bytearray(random.Random(f"{seed}{name}").randbytes(size)) for name in "ab"}
    received = {name: bytearray(size) for name in "ab"}

    def cut(data: bytearray) -> list[memoryview]:
        places = sorted(chance.randrange(size + 1) for _ in range(chance.choice([0, 3, 200])))
        whole = memoryview(data)
        return [whole[start:stop] for start, stop in zip([0, *places], [*places, size], strict=True)]

    plans = {name: (cut(sent[name]), cut(received[name])) for name in "ab"}

    def exchange(group: Group, peer: str) -> float:
        began = time.monotonic()
        out, into = plans[group.me]
        group.exchange([(peer, out)], [(peer, into)], interrupted=quiet)
        return time.monotonic() - began

    one, other = groups
    with ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            ends = pool.submit(exchange, one, "b"), pool.submit(exchange, other, "a")
            # Half a second is the poll's own time-out: whoever had to wait for it would need twice as long.
            assert sum(end.result(WAIT_S) for end in ends) < 0.9 or size > 1_000_000
    assert received["a"] == sent["b"] and received["b"] == sent["a"]


def test_frames_before_and_after_bulk_data_are_found(groups: tuple[Group, Group]) -> None:
    """One record may hold the end of the bulk data and the frame behind it: `resume` takes it from there."""
    one, other = groups
    data = os.urandom(50_000)
    near = one.connections["b"].sock
    near.setblocking(True)
    near.sendall(encode(Ready(1, ()), {"bulk": 1}) + data[:100])
    near.sendall(data[100:] + encode(Done(1)) + encode(Done(2)))
    near.setblocking(False)
    (first,) = listen(other, 1)
    assert isinstance(first, Said) and first.note == {"bulk": 1}
    into = bytearray(len(data))
    other.exchange([], [("a", [memoryview(into)])], interrupted=quiet)
    assert into == data
    assert [item.message.step for item in other.resume("a") if isinstance(item, Said)] == [1, 2]


def test_a_quiet_connection_does_not_spin(groups: tuple[Group, Group]) -> None:
    one, _ = groups
    began, cpu = time.monotonic(), time.thread_time()
    assert one.poll(0.4) == []
    assert time.monotonic() - began > 0.3
    assert time.thread_time() - cpu < 0.1


def test_half_a_record_does_not_spin(keys: Keys) -> None:
    near, far = pair(keys)
    group = Group(View(1, ("a", "b")), "a", decode)
    group.add(Connection("b", near))
    raw = socket.socket(fileno=os.dup(far.fileno()))
    raw.sendall(b"\x17\x03\x03\x40\x00" + bytes(100))  # the head of a record of 16 KB, and no more of it
    assert select.select([near], [], [], WAIT_S)[0]
    cpu = time.thread_time()
    calls = 0
    deadline = time.monotonic() + 0.3
    while time.monotonic() < deadline:
        assert group.poll(0.1) == []
        calls += 1
    assert calls < 10 and time.thread_time() - cpu < 0.1
    for sock in (raw, far):
        sock.close()
    group.close()


@pytest.mark.parametrize("farewell", [True, False])
def test_a_closed_connection_is_noticed_at_once(groups: tuple[Group, Group], farewell: bool) -> None:
    """With TLS's own good-bye or, as when a process is killed, without."""
    one, other = groups
    sock = other.connections["a"].sock
    if farewell:
        sock.setblocking(True)
        sock.settimeout(0.1)
        with pytest.raises(OSError):
            sock.unwrap()  # type: ignore[attr-defined] # says good-bye, and waits for the other's in vain
    began = time.monotonic()
    other.close()
    (gone,) = listen(one, 1)
    assert isinstance(gone, Gone) and time.monotonic() - began < 0.5


@pytest.mark.parametrize("sending", [True, False])
def test_a_peer_that_dies_in_the_middle_of_bulk_data_breaks_the_exchange(
    groups: tuple[Group, Group], sending: bool
) -> None:
    one, other = groups
    plan = [("b", [memoryview(bytearray(50_000_000))])]
    with ThreadPoolExecutor(1) as pool:
        moving = pool.submit(one.exchange, plan if sending else [], [] if sending else plan, interrupted=quiet)
        sock = other.connections["a"].sock
        if sending:
            assert select.select([sock], [], [], WAIT_S)[0]
        else:
            sock.send(bytes(10_000))
        other.close()
        with pytest.raises(BrokenGroup, match="lost b"):
            moving.result(WAIT_S)


def test_tampering_is_noticed(keys: Keys) -> None:
    near, far = pair(keys)
    group = Group(View(1, ("a", "b")), "a", decode)
    group.add(Connection("b", near))
    raw = socket.socket(fileno=os.dup(far.fileno()))
    raw.sendall(b"\x17\x03\x03\x00\x20" + os.urandom(32))  # a record that nobody with the session's key made
    (gone,) = listen(group, 1)
    assert isinstance(gone, Gone)
    for sock in (raw, far):
        sock.close()
    group.close()


def snapshot() -> Snapshot:
    values: dict[str, Any] = {"large": torch.arange(3_000_000, dtype=torch.float32), "small": torch.ones(3), "lr": 0.1}
    tree, tensors = flatten(values)
    return Snapshot(7, pack_tree(tree), tuple(tensors))


def test_a_snapshot_moves_over_tls(keys: Keys) -> None:
    held, pairs = snapshot(), [pair(keys), pair(keys)]
    servers = [threading.Thread(target=serve, args=(far, held)) for _, far in pairs]
    for server in servers:
        server.start()
    found = fetch([near for near, _ in pairs], bytes_max=10**8, expect_step=7, stall_s=5.0)
    assert found.digest() == held.digest()
    for near, _ in pairs:
        near.close()
    for server in servers:
        server.join(WAIT_S)
        assert not server.is_alive()
    for _, far in pairs:
        far.close()


def test_a_reader_that_stalls_costs_its_own_time_and_no_more(keys: Keys) -> None:
    held = snapshot()
    near, far = pair(keys)
    chunk = Request("tensors", 0, held.nbytes)
    for _ in range(8):  # 96 MB: more than any socket's buffers
        near.sendall(chunk.encode())
    began = time.monotonic()
    with pytest.raises(PeerError, match="does not read"):
        serve(far, held, stall_s=0.3, total_s=5.0)
    assert 0.2 < time.monotonic() - began < 3.0
    near.close()
    far.close()


def test_a_reader_that_drips_is_bounded_in_all(keys: Keys) -> None:
    held = snapshot()
    near, far = pair(keys)
    ended = threading.Event()

    def drip() -> None:
        for _ in range(8):
            near.sendall(Request("tensors", 0, held.nbytes).encode())
        near.settimeout(WAIT_S)
        while not ended.wait(0.02):
            try:
                near.recv(50_000)
            except OSError:
                return

    dripping = threading.Thread(target=drip)
    dripping.start()
    began = time.monotonic()
    with pytest.raises(PeerError):
        serve(far, held, stall_s=1.0, total_s=0.8)
    assert time.monotonic() - began < 3.0
    ended.set()
    dripping.join(WAIT_S)
    near.close()
    far.close()
