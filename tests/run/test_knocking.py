"""Knocking at workers with real listeners: who answers, who does not, and that it costs the other side nothing."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from holdfast.core.words import Registration
from holdfast.engine.recovery.knocking import Knocker
from holdfast.membership.messages import Knock, Knocked
from holdfast.net.groups import Connection
from holdfast.net.listener import HandedOver, Listener
from holdfast.net.mailbox import Mailbox
from holdfast.net.meeting import GROUP
from holdfast.net.sockets import open_tcp, open_unix
from holdfast.net.wires import SocketWires
from holdfast.trust.keys import Keys, create_keys

WITHIN_S = 2.0


class Street:
    """Workers that only listen. `handed_over` is what their loops would get to see."""

    def __init__(self, directory: Path, keys: Keys, stack: ExitStack) -> None:
        self._directory = directory
        self._keys = keys
        self._stack = stack
        self.handed_over: list[int] = []
        self.registrations: dict[str, Registration] = {}
        self.mailbox = Mailbox()
        stack.callback(os.close, self.mailbox.fd)
        self.knocker = Knocker("w9.1@a", SocketWires("a", keys), self.mailbox)

    def house(self, id: str, *, says: str = "") -> None:
        """A worker of host a, reached by a unix socket and with memory to share; of any other host, by TCP and TLS."""
        near = id.endswith("@a")
        server, address = open_unix(self._directory / f"{id}.sock") if near else open_tcp("127.0.0.1")
        listener = Listener([server], self._keys, says or id, {GROUP: HandedOver(self._group)})
        self._stack.callback(listener.close)
        self.put_up(id, address)

    def put_up(self, id: str, address: str) -> None:
        host = id.partition("@")[2]
        local = address if address.startswith("unix:") else ""
        self.registrations[id] = Registration(
            id=id, host=host, pid=1, pid_started=1, address=address, fingerprint="", local=local
        )

    def _group(self, view: int, connection: Connection) -> None:
        self.handed_over.append(view)
        connection.close()

    def knock(self, *peers: str, number: int = 1, within_s: float = WITHIN_S) -> Knocked:
        self.knocker.knock(Knock(number, peers, within_s), self.registrations)
        found: list[Knocked] = []
        wait_until(lambda: bool(found.extend(self.mailbox.take_all()) or found))
        assert len(found) == 1
        return found[0]


def wait_until(condition: Callable[[], bool], within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return create_keys(tmp_path_factory.mktemp("run") / "keys")


@pytest.fixture
def street(tmp_path: Path, keys: Keys) -> Iterator[Street]:
    with ExitStack() as stack:
        yield Street(tmp_path, keys, stack)


def test_all_who_listen_answer_near_and_far(street: Street) -> None:
    street.house("w0.1@a")
    street.house("w0.1@b")
    assert street.knock("w0.1@a", "w0.1@b", number=7) == Knocked(7, ("w0.1@a", "w0.1@b"), ())
    assert street.handed_over == []  # their loops, which may be busy for long, have nothing to do with it


def test_whoever_is_not_there_is_missed_when_the_time_is_over_and_not_before(street: Street) -> None:
    street.house("w0.1@a")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        street.put_up("w0.1@b", f"tcp:127.0.0.1:{closed.getsockname()[1]}")  # refuses
        began = time.monotonic()
        assert street.knock("w0.1@a", "w0.1@b", "w0.1@c") == Knocked(1, ("w0.1@a",), ("w0.1@b", "w0.1@c"))
        assert WITHIN_S - 0.1 < time.monotonic() - began < WITHIN_S + 5.0


def test_one_that_refuses_at_first_is_tried_again(street: Street) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        street.put_up("w0.1@b", f"tcp:127.0.0.1:{server.getsockname()[1]}")
        street.knocker.knock(Knock(1, ("w0.1@b",), 20.0), street.registrations)
        time.sleep(0.3)  # it has been refused at least once
        assert street.mailbox.is_empty
        listener = Listener([server], street._keys, "w0.1@b", {GROUP: HandedOver(street._group)})
        server.listen()
        try:
            wait_until(lambda: not street.mailbox.is_empty)
        finally:
            listener.close()
    assert street.mailbox.take_all() == [Knocked(1, ("w0.1@b",), ())]


def test_a_listener_that_says_nothing_does_not_answer(street: Street) -> None:
    """The process is stopped, say: its kernel takes the connection, and nobody proves anything."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        street.put_up("w0.1@b", f"tcp:127.0.0.1:{silent.getsockname()[1]}")
        assert street.knock("w0.1@b").missed == ("w0.1@b",)


def test_another_worker_at_the_same_address_is_not_the_one(street: Street) -> None:
    street.house("w0.1@a", says="w0.2@a")
    assert street.knock("w0.1@a", within_s=1.0).missed == ("w0.1@a",)


def test_a_stranger_does_not_answer(street: Street, tmp_path: Path) -> None:
    street.house("w0.1@b")
    stranger = Knocker("w9.1@a", SocketWires("a", create_keys(tmp_path / "other")), street.mailbox)
    stranger.knock(Knock(1, ("w0.1@b",), 1.0), street.registrations)
    wait_until(lambda: not street.mailbox.is_empty)
    assert street.mailbox.take_all() == [Knocked(1, (), ("w0.1@b",))]


def test_knocks_leave_nothing_open(street: Street) -> None:
    street.house("w0.1@a")
    before = open_descriptors()
    for number in range(1, 101):
        street.knock("w0.1@a", number=number)
    wait_until(lambda: open_descriptors() <= before + 2)
    assert street.handed_over == []
