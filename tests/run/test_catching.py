"""Means of steps in which somebody was left behind: kept within bounds, sent whole or not at all."""

from __future__ import annotations

import socket
import threading

import pytest
import torch
import xxhash

from holdfast.core.errors import PeerError, StorageError
from holdfast.engine.recovery import catching
from holdfast.engine.recovery.catching import MeanDesk, receive_mean, serve_mean
from holdfast.membership import messages as m
from holdfast.membership.codec import encode
from holdfast.net.byte_ranges import Status, encode_reply
from holdfast.net.framing import LENGTH
from holdfast.reduce.layout import Layout
from holdfast.reduce.reduction import KeptMean

LAYOUT = Layout([torch.zeros(3), torch.zeros(5)])


def kept(step: int, *, intact: bool = True) -> KeptMean:
    memory = torch.full((LAYOUT.slot_bytes,), step % 251, dtype=torch.uint8)
    return KeptMean(step, LAYOUT, memory, frozenset({0, 1}), {"loss": 0.5}, lambda: intact)


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_what_is_kept_is_a_copy_for_a_while_of_the_last_few() -> None:
    clock = Clock()
    desk = MeanDesk(clock)
    first = kept(1)
    assert desk.put(first, 30.0) and not desk.put(kept(9, intact=False), 30.0)
    first.memory.zero_()
    found = desk.find(1)
    assert found is not None and bool((found.memory == 1).all()) and desk.find(9) is None
    for step in (2, 3, 4):
        clock.now += 1.0
        desk.put(kept(step), 30.0)
    assert [step for step in range(6) if desk.find(step)] == [2, 3, 4]
    clock.now += 28.5
    desk.clear_away()
    assert [step for step in range(6) if desk.find(step)] == [3, 4]


def test_of_large_ones_the_last_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catching, "LARGE_BYTES", 1)
    desk = MeanDesk()
    for step in (5, 6):
        desk.put(kept(step), 30.0)
    assert desk.find(5) is None and desk.find(6) is not None


def test_a_mean_arrives_as_it_was_sent() -> None:
    desk = MeanDesk()
    desk.put(kept(7), 30.0)
    near, far = socket.socketpair()
    with near:
        thread = threading.Thread(target=serve_mean, args=(near, desk, 7))
        thread.start()
        with far:
            found = receive_mean(far, 7, LAYOUT)
        thread.join()
    assert torch.equal(found.memory, kept(7).memory)
    assert found.step == 7 and found.present == {0, 1} and found.metrics == {"loss": 0.5} and found.is_intact()


def test_who_has_no_mean_hangs_up() -> None:
    near, far = socket.socketpair()
    with far:
        with near:
            serve_mean(near, MeanDesk(), 7)
        with pytest.raises((PeerError, OSError)):
            receive_mean(far, 7, LAYOUT)


def body(message: m.Message, note: object = None) -> bytes:
    return encode(message, note)[LENGTH.size :]


def reply(data: bytes, length: int | None = None) -> bytes:
    size = len(data) if length is None else length
    return encode_reply(Status.OK, size) + data + xxhash.xxh3_128_digest(data)


GOOD = reply(body(m.GivenMean(7), kept(7).note()))
SLOT = LAYOUT.slot_bytes


@pytest.mark.parametrize(
    "sent",
    [
        GOOD + encode_reply(Status.OK, SLOT) + bytes(SLOT) + bytes(16),
        GOOD + encode_reply(Status.OK, SLOT) + bytes(3),
        GOOD + reply(bytes(SLOT - 1)),
        GOOD + encode_reply(Status.MISSING, 3) + b"no.",
        GOOD[:-1] + bytes([GOOD[-1] ^ 1]) + reply(bytes(SLOT)),
        reply(body(m.GivenMean(8), kept(8).note())) + reply(bytes(SLOT)),
        reply(body(m.Done(7))) + reply(bytes(SLOT)),
        reply(body(m.GivenMean(7), {"p": "x"})) + reply(bytes(SLOT)),
        encode_reply(Status.OK, 1 << 30),
        reply(b""),
        reply(b"{]"),
    ],
    ids=[
        *("damaged", "short", "another size", "missing", "a damaged note", "another step", "another message"),
        *("no note", "too long", "empty", "not JSON"),
    ],
)
def test_what_is_not_the_mean_is_not_taken(sent: bytes) -> None:
    near, far = socket.socketpair()
    with far, near:
        near.sendall(sent)
        near.shutdown(socket.SHUT_WR)
        with pytest.raises((PeerError, StorageError)):
            receive_mean(far, 7, LAYOUT)
