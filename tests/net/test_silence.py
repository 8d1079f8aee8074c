"""A host that no longer answers is given up within seconds; one that answers for a busy process is not.

The first half happens in network namespaces whose network is cut: real packets that do not arrive.
"""

from __future__ import annotations

import ctypes
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import pytest

from holdfast.core.words import View
from holdfast.membership.codec import decode, encode
from holdfast.membership.messages import Done
from holdfast.net.groups import SILENT, BrokenGroup, Connection, Gone, Group, Said
from holdfast.net.silence import SILENT_S, is_silent
from holdfast.net.sockets import prepare
from holdfast.testing.switchboard import Switchboard, why_not
from holdfast.trust.keys import Keys, create_keys

WAIT_S = 30.0
CLONE_NEWNET = 0x40000000
T = TypeVar("T")


@pytest.fixture(scope="module")
def board() -> Iterator[Switchboard]:
    if reason := why_not():
        pytest.skip(reason)
    with Switchboard(["a", "b"]) as made:
        yield made


@pytest.fixture(autouse=True)
def _healed(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "board" in request.fixturenames:
        request.getfixturevalue("board").heal()


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return create_keys(tmp_path_factory.mktemp("run") / "keys")


def on_host(board: Switchboard, host: str, action: Callable[[], T]) -> T:
    """Do it in the host's network. A socket stays where it was made, whoever uses it later."""

    def enter_and_act() -> T:
        with Path(f"/run/netns/{board.namespace(host)}").open() as space:
            libc = ctypes.CDLL(None, use_errno=True)
            assert libc.setns(space.fileno(), CLONE_NEWNET) == 0, os.strerror(ctypes.get_errno())
        return action()

    with ThreadPoolExecutor(1) as pool:  # the thread ends, and with it its being there
        return pool.submit(enter_and_act).result(WAIT_S)


def wrapped(near: socket.socket, far: socket.socket, keys: Keys | None) -> tuple[socket.socket, socket.socket]:
    for sock in (near, far):
        prepare(sock)
        sock.settimeout(WAIT_S)
    if keys is None:
        return near, far
    client, server = keys.client_context(), keys.server_context()
    assert client is not None and server is not None
    with ThreadPoolExecutor(1) as pool:
        accepting = pool.submit(server.wrap_socket, far, server_side=True)
        return client.wrap_socket(near), accepting.result(WAIT_S)


def between_hosts(board: Switchboard, keys: Keys | None = None) -> tuple[socket.socket, socket.socket]:
    """A connection from host a to host b, and its other end."""
    with on_host(board, "b", lambda: socket.create_server((board.address("b"), 0))) as server:
        near = on_host(board, "a", lambda: socket.create_connection(server.getsockname(), timeout=WAIT_S))
        far, _ = server.accept()
    return wrapped(near, far, keys)


def on_loopback(keys: Keys | None = None) -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    return wrapped(near, far, keys)


def group_over(sock: socket.socket) -> Group:
    group = Group(View(1, ("here", "there")), "here", decode)
    group.add(Connection("there", sock))
    return group


def listen(group: Group, timeout_s: float) -> list[Said | Gone]:
    """The first news, as the worker's loop waits for them."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if news := group.poll(0.2):
            return news
    return []


def quiet() -> str:
    return ""


# What a member does when the network under it is cut: each gives when it knew, and why.


def speaks(group: Group) -> tuple[str, str]:
    """It has said something, and waits for an answer."""
    assert group.send("there", encode(Done(1))) is None
    (gone,) = listen(group, WAIT_S)
    assert isinstance(gone, Gone)
    return gone.peer, gone.reason


def sends(group: Group) -> tuple[str, str]:
    return exchanges(group, out=40_000_000)


def sends_and_receives(group: Group) -> tuple[str, str]:
    return exchanges(group, out=40_000_000, into=40_000_000)


def exchanges(group: Group, out: int = 0, into: int = 0) -> tuple[str, str]:
    data = memoryview(bytearray(max(out, into)))
    with pytest.raises(BrokenGroup) as broken:
        group.exchange([("there", [data[:out]])], [("there", [data[:into]])], interrupted=quiet)
    return broken.value.peer, broken.value.reason


def waits(group: Group) -> tuple[str, str]:
    """Everything it said was heard. Only the kernel's own questions, which are not answered, find out."""
    (gone,) = listen(group, WAIT_S)
    assert isinstance(gone, Gone)
    return gone.peer, gone.reason


def waits_for_bulk(group: Group) -> tuple[str, str]:
    return exchanges(group, into=1000)


@pytest.mark.parametrize("way", ["both ways", "answers only"])
def test_a_host_that_is_cut_off_is_given_up_within_seconds(board: Switchboard, keys: Keys, way: str) -> None:
    """Whatever a member was doing, with TLS and without. If only the answers get lost, what counts is the same."""
    plans = [
        (action, with_keys)
        for action in (speaks, sends, sends_and_receives, waits, waits_for_bulk)
        for with_keys in (None, keys)
    ]
    with ExitStack() as stack, ThreadPoolExecutor(len(plans)) as pool:
        groups = []
        for _, with_keys in plans:
            near, far = between_hosts(board, with_keys)
            stack.callback(far.close)
            groups.append(group_over(near))
            stack.callback(groups[-1].close)
        if way == "both ways":
            board.cut("a", "b")
        else:
            board.cut_one_way("b", "a")
        began = time.monotonic()
        known: list[Future[tuple[tuple[str, str], float]]] = [
            pool.submit(lambda action=action, group=group: (action(group), time.monotonic() - began))
            for (action, _), group in zip(plans, groups, strict=True)
        ]
        for (action, _), future in zip(plans, known, strict=True):
            (peer, reason), after_s = future.result(WAIT_S)
            assert peer == "there"
            # Who only waits may be told by the kernel first, in its own words.
            assert reason == SILENT or action in (waits, waits_for_bulk), (action.__name__, reason)
            assert 1.5 < after_s < SILENT_S + 4.0, (action.__name__, after_s)


def test_a_short_outage_is_survived(board: Switchboard, keys: Keys) -> None:
    near, far = between_hosts(board, keys)
    group = group_over(near)
    data, into = os.urandom(5_000_000), bytearray(5_000_000)
    board.cut("a", "b")
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(lambda: group.exchange([("there", [memoryview(data)])], [], interrupted=quiet))
        healing = threading.Timer(1.2, board.heal)
        healing.start()
        read_all(far, into)
        sending.result(WAIT_S)
        healing.join()
    assert into == data
    far.close()
    group.close()


def test_a_peer_that_does_not_read_is_not_given_up(keys: Keys) -> None:
    """It is stopped or busy for far longer than SILENT_S; its kernel answers. Then it goes on, and so do we."""
    data = bytes(30_000_000)
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        moving = []
        for near, far in (on_loopback(keys), on_loopback()):
            group = group_over(near)
            stack.callback(group.close)
            plan = [("there", [memoryview(data)])]
            moving.append((far, pool.submit(group.exchange, plan, [], interrupted=quiet)))
        deadline = time.monotonic() + SILENT_S + 4.0
        while time.monotonic() < deadline:
            for _, sending in moving:
                assert not wait([sending], 0.2).done
        for far, sending in moving:
            read_all(far, bytearray(len(data)))
            sending.result(WAIT_S)
            far.close()


def read_all(sock: socket.socket, into: bytearray) -> None:
    filled = 0
    while filled < len(into):
        filled += sock.recv_into(memoryview(into)[filled:])


def test_a_long_silence_before_the_first_word_is_no_evidence() -> None:
    """Without the kernel's questions, too: what counts is that something waits for an answer, twice in a row."""
    near, far = on_loopback()
    near.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 0)
    far.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 0)
    group = group_over(near)
    deadline = time.monotonic() + SILENT_S + 1.0
    while time.monotonic() < deadline:
        assert group.poll(0.2) == []
    assert not is_silent(near)
    assert group.send("there", encode(Done(1))) is None
    deadline = time.monotonic() + 1.5
    while time.monotonic() < deadline:
        assert group.poll(0.2) == []
    far.close()
    group.close()


def test_unix_sockets_and_closed_ones_are_not_asked() -> None:
    one, other = socket.socketpair()
    with one, other:
        assert not is_silent(one)
    near, far = on_loopback()
    near.close()
    far.close()
    assert not is_silent(near)
