"""A frame that a TLS socket took a part of goes on in an exchange; a peer that is killed shows at once."""

from __future__ import annotations

import os
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from connected_pairs import MEMBERS, WAIT_S, group, tcp_pair, tls_pair, two_groups

from holdfast.membership.codec import encode
from holdfast.membership.messages import Done, Ready
from holdfast.net.groups import BrokenGroup, Gone, Group, Said
from holdfast.trust.keys import Keys

A, B = MEMBERS
MIB = 1 << 20


def heard(one: Group, count: int, timeout_s: float = WAIT_S) -> list[Said | Gone]:
    news: list[Said | Gone] = []
    deadline = time.monotonic() + timeout_s
    while len(news) < count and (left_s := deadline - time.monotonic()) > 0:
        news += one.poll(min(left_s, 0.2))
    return news


@pytest.mark.parametrize("mib", [0, 3, 7])
def test_a_frame_that_did_not_fit_goes_on_in_an_exchange(keys: Keys, mib: int) -> None:
    """A TLS socket that took a part of it wants the same bytes again, and no fewer at once than before."""
    left, right = two_groups(*tls_pair(keys))
    for sock in (left.connections[B].sock, right.connections[A].sock):
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, 64 * 1024)
    note = "x" * (mib * MIB + 900_000)
    left.send(B, encode(Ready(1, (2,)), {"x": note}))
    left.send(B, encode(Done(2), None))  # behind it, in the outbox
    left.send(B, encode(Ready(3, ()), {"bulk": 1}))
    assert left.connections[B].outbox
    into, out = bytearray(64), bytes(range(64))

    def reading() -> None:
        said = [one for one in heard(right, 3) if isinstance(one, Said)]
        assert [one.message for one in said] == [Ready(1, (2,)), Done(2), Ready(3, ())]
        assert said[0].note["x"] == note
        right.exchange([], [(A, [memoryview(into)])], interrupted=lambda: "")

    with ThreadPoolExecutor(1) as pool:
        hearing = pool.submit(reading)
        left.exchange([(B, [memoryview(out)])], [], interrupted=lambda: "")
        hearing.result(WAIT_S)
    assert into == out
    left.close()
    right.close()


@pytest.mark.parametrize("secret", [True, False], ids=["tls", "plain"])
@pytest.mark.parametrize("where", ["poll", "exchange"])
def test_a_killed_peer_shows_at_once(keys: Keys, secret: bool, where: str) -> None:
    """It says no good-bye, neither TLS's nor ours: the kernel closes its sockets."""
    left, right = tls_pair(keys) if secret else tcp_pair()
    child = os.fork()
    if child == 0:
        os.close(left.detach())
        signal.pause()
        os._exit(0)
    os.close(right.detach())  # the child's alone now, without a word to the other side
    mine = group(A, B, left)
    try:
        assert mine.poll(0.05) == []
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        began = time.monotonic()
        if where == "poll":
            (news,) = heard(mine, 1, 1.0)
            assert isinstance(news, Gone) and news.peer == B
        else:
            with pytest.raises(BrokenGroup) as broken:
                mine.exchange([], [(B, [memoryview(bytearray(10))])], interrupted=lambda: "")
            assert broken.value.peer == B
        assert time.monotonic() - began < 0.2
    finally:
        mine.close()
