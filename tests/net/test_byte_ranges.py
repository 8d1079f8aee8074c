"""Giving bytes: what is asked for arrives whole, what is damaged is noticed, and nothing hostile gets further."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest
import xxhash
from hypothesis import example, given, settings
from hypothesis import strategies as st

from holdfast.core.errors import HoldfastError, IntegrityError, NotStored, PeerError, ProtocolError, StorageRefused
from holdfast.net import byte_ranges
from holdfast.net.byte_ranges import (
    REQUEST_BYTES_MAX,
    ByteReader,
    Offer,
    Request,
    Status,
    blocks,
    decode_reply,
    encode_reply,
    serve_bytes,
)
from holdfast.net.framing import LENGTH, frame, take_frame
from holdfast.net.streams import Deadline

DATA = bytes(range(256)) * 10
WAIT_S = 10.0


def find(name: str) -> Offer:
    if name == "data":
        return Offer(DATA)
    if name == "locked":
        raise StorageRefused("it is not for you")
    raise NotStored(f"there is no {name}")


@contextmanager
def serving(find: Callable[[str], Offer] = find) -> Iterator[ByteReader]:
    near, far = socket.socketpair()

    def serve() -> None:
        with far, suppress(HoldfastError):
            serve_bytes(far, find, stall_s=WAIT_S)

    thread = threading.Thread(target=serve)
    thread.start()
    with near:
        yield ByteReader(near, Deadline(WAIT_S, WAIT_S))
    thread.join(WAIT_S)
    assert not thread.is_alive()


@pytest.mark.parametrize("block", [1, 100, 1 << 20])
def test_what_is_asked_for_arrives(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_ranges, "BLOCK_BYTES", block)
    with serving() as reader:
        assert reader.read("data", len(DATA)) == DATA
        for start, stop in ((0, 1), (5, 5), (17, 2000), (len(DATA) - 1, len(DATA))):
            found = bytearray(stop - start)
            digest = reader.read_into("data", start, stop, blocks(memoryview(found)))
            assert found == DATA[start:stop] and digest == xxhash.xxh3_128_digest(found)


def test_after_a_refusal_one_can_ask_on() -> None:
    with serving() as reader:
        with pytest.raises(NotStored, match="there is no nothing"):
            reader.read("nothing", 10)
        with pytest.raises(IntegrityError, match="it is not for you"):
            reader.read("locked", 10)
        with pytest.raises(IntegrityError, match="data has 2560 bytes, fewer than the 2561 it must have"):
            reader.read_into("data", 2560, 2561, blocks(memoryview(bytearray(1))))
        assert reader.read("data", len(DATA)) == DATA
        with pytest.raises(ProtocolError, match="an answer of 2560 bytes, where at most 2559"):
            reader.read("data", len(DATA) - 1)


def test_bytes_that_are_not_those_promised_are_noticed() -> None:
    class Changed(Offer):
        def digest(self, start: int, stop: int) -> bytes:
            return bytes(16)  # of what they were before

    with serving(lambda name: Changed(DATA)) as reader:
        for _ in range(2):
            with pytest.raises(IntegrityError, match="not those that were promised"):
                reader.read("data", len(DATA))


@given(st.integers(9, 9 + len(DATA) + 15), st.integers(1, 255))
def test_a_flipped_bit_anywhere_in_an_answer_is_noticed(place: int, change: int) -> None:
    answer = bytearray(encode_reply(Status.OK, len(DATA)) + DATA + xxhash.xxh3_128_digest(DATA))
    answer[place] ^= change
    near, far = socket.socketpair()
    with near, far:
        far.sendall(answer)
        with pytest.raises(IntegrityError):
            ByteReader(near, Deadline(WAIT_S, WAIT_S)).read("data", len(DATA))


def test_every_offer_is_closed() -> None:
    closed = []

    class File(Offer):
        def close(self) -> None:
            closed.append(self)

    with serving(lambda name: File(DATA)) as reader:
        reader.read("data", len(DATA))
        with pytest.raises(IntegrityError):
            reader.read_into("data", 0, 1 << 20, [])
    assert len(closed) == 2


numbers = st.sampled_from([None, -1, 0, 1, 2**62, 2**62 + 1, 10**30, 1.5, True, "1", []])


@settings(max_examples=200)
@given(st.sampled_from(["data", "x" * 5000, "", None, 7, ["data"]]), numbers, numbers)
def test_requests_are_checked_field_by_field(name: object, start: object, stop: object) -> None:
    body = json.dumps({"name": name, "start": start, "stop": stop}).encode()
    try:
        request = Request.decode(body)
    except ProtocolError:
        return
    assert type(request.start) is int and 0 <= request.start <= (request.stop or 2**62) <= 2**62
    assert isinstance(request.name, str) and len(request.name) <= 1000
    assert take_frame(bytearray(request.encode()), REQUEST_BYTES_MAX * 4) is not None


@settings(max_examples=80)
@given(st.binary(max_size=80))
@example(Request("data").encode()[:5])
@example(LENGTH.pack(REQUEST_BYTES_MAX + 1))
@example(LENGTH.pack(0xFFFFFFFF))
@example(frame(b"[" * 4000))
@example(struct.pack("!BQQ", 3, 0, 2**64 - 1))
def test_hostile_requests_get_a_typed_error(data: bytes) -> None:
    mine, theirs = socket.socketpair()
    with mine, theirs:
        mine.sendall(data)
        mine.shutdown(socket.SHUT_WR)
        with suppress(PeerError):
            serve_bytes(theirs, find, stall_s=1)


@settings(max_examples=80)
@given(
    st.one_of(
        st.binary(max_size=60),
        st.binary(max_size=60).map(lambda data: encode_reply(Status.OK, len(data)) + data),
        st.tuples(st.sampled_from(Status), st.integers(0, 2**64 - 1)).map(lambda head: encode_reply(*head)),
    )
)
def test_hostile_answers_get_a_typed_error(data: bytes) -> None:
    with suppress(ProtocolError):
        decode_reply(data)
    mine, theirs = socket.socketpair()
    with mine, theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises((PeerError, IntegrityError, NotStored)):
            ByteReader(mine, Deadline(1.0, 1.0)).read("data", 1000)


def test_nobody_waits_for_ever() -> None:
    mine, theirs = socket.socketpair()
    with mine, theirs:
        with pytest.raises(PeerError, match="gone or does not read"):
            serve_bytes(theirs, find, stall_s=0.05)
        with pytest.raises(TimeoutError):
            ByteReader(mine, Deadline(0.05, WAIT_S)).read("data", 1000)
        with pytest.raises(TimeoutError):
            ByteReader(mine, Deadline(WAIT_S, 0.05)).read("data", 1000)
