"""Whoever does not know the secret, or knows it and misbehaves, loses a connection and nothing else happens."""

from __future__ import annotations

import os
import select
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.errors import ConfigError, LedgerRefused, LedgerUnavailable, PeerError, ProtocolError
from holdfast.ledger import wire
from holdfast.ledger.embedded import ConnectionPatience, EmbeddedLedger, EmbeddedServer, ServerLimits
from holdfast.ledger.port import VALUE_BYTES_MAX
from holdfast.net.proving import client_handshake
from holdfast.trust.handshake import MAC_BYTES, MAGIC, NONCE_BYTES, ServerHandshake

from .contract import WAIT_S
from .serving import SECRET

LIMITS = ServerLimits(connections_max=6, patience=ConnectionPatience(handshake_s=0.3, frame_s=0.3, send_s=0.3))


@pytest.fixture
def ledger(tmp_path: Path, socket_path: Path) -> Iterator[EmbeddedLedger]:
    server = EmbeddedServer(tmp_path / "ledger", socket_path, SECRET, limits=LIMITS)
    server.start()
    with closing(EmbeddedLedger(socket_path, SECRET, timeout_s=WAIT_S)) as ledger:
        ledger.put("a", b"1")
        yield ledger
        entry = ledger.get("a")
        assert entry is not None
        assert entry.value == b"1"
    assert server.alive
    server.stop()


@pytest.fixture
def stranger(ledger: EmbeddedLedger, socket_path: Path) -> Iterator[socket.socket]:
    with connected(socket_path) as sock:
        yield sock


def connected(socket_path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(WAIT_S)
    sock.connect(os.fspath(socket_path))
    return sock


def shake(sock: socket.socket) -> None:
    client_handshake(sock, SECRET, time.monotonic() + WAIT_S, kind=wire.LEDGER)


def server_handshake(sock: socket.socket, kind: bytes) -> None:
    """The accepting side, for a server that waits."""
    sock.settimeout(WAIT_S)
    handshake = ServerHandshake(SECRET, kind)
    while handshake.need:
        data = sock.recv(handshake.need, socket.MSG_WAITALL)
        if len(data) != handshake.need:
            raise PeerError("the other side closed the connection during the handshake")
        sock.sendall(handshake.feed(data))


def hung_up(sock: socket.socket, within_s: float = WAIT_S) -> bool:
    """Whether the server closes its end in time, without reading what it sent before."""
    poll = select.poll()
    poll.register(sock, 0)
    return bool(poll.poll(within_s * 1000))


# -- before the proof


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\nHost: ledger\r\n\r\n\r\n\r\n", bytes(40), os.urandom(4096)],
    ids=["http", "zeros", "random"],
)
def test_garbage_is_hung_up_on(stranger: socket.socket, data: bytes) -> None:
    stranger.sendall(data)
    assert hung_up(stranger)


def test_silence_is_hung_up_on(stranger: socket.socket) -> None:
    began = time.monotonic()
    assert hung_up(stranger)
    assert 0.2 < time.monotonic() - began < 1.0


def test_a_drip_does_not_put_off_the_deadline(stranger: socket.socket) -> None:
    began = time.monotonic()
    for byte in MAGIC + bytes(NONCE_BYTES):
        try:
            stranger.send(bytes([byte]))
        except OSError:
            break
        if hung_up(stranger, 0.05):
            break
    assert time.monotonic() - began < 1.0


def test_a_guessed_proof_is_hung_up_on(stranger: socket.socket) -> None:
    stranger.sendall(MAGIC + bytes(NONCE_BYTES))
    assert len(stranger.recv(4096)) == NONCE_BYTES + MAC_BYTES
    stranger.sendall(os.urandom(MAC_BYTES))
    assert hung_up(stranger)


def test_a_proof_played_back_is_hung_up_on(stranger: socket.socket) -> None:
    stranger.sendall(MAGIC + bytes(NONCE_BYTES))
    answer = stranger.recv(4096)
    stranger.sendall(answer[NONCE_BYTES:])
    assert hung_up(stranger)


def test_a_client_with_another_secret_is_refused(ledger: EmbeddedLedger, socket_path: Path) -> None:
    with closing(EmbeddedLedger(socket_path, bytes(32))) as wrong:
        with pytest.raises(LedgerRefused, match="secret"):
            wrong.get("a")
        with pytest.raises(LedgerRefused, match="secret"):
            wrong.watch("a", revision=0).next(1.0)


def test_a_client_does_not_talk_to_an_impostor(socket_path: Path) -> None:
    heard = bytearray()

    def impersonate(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        with sock:
            sock.settimeout(WAIT_S)
            heard.extend(sock.recv(4096))
            sock.sendall(bytes(NONCE_BYTES + MAC_BYTES))
            heard.extend(sock.recv(4096))

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(os.fspath(socket_path))
        listener.listen()
        listener.settimeout(WAIT_S)
        with ThreadPoolExecutor(1) as pool, closing(EmbeddedLedger(socket_path, SECRET)) as ledger:
            impostor = pool.submit(impersonate, listener)
            with pytest.raises(LedgerRefused, match="not this run's ledger"):
                ledger.put("a", b"for the run alone")
            impostor.result(WAIT_S)
    assert len(heard) == len(MAGIC) + NONCE_BYTES, "nothing but a greeting"


@pytest.mark.parametrize(
    ("secret", "kind", "fails"),
    [(SECRET, b"mesh", False), (SECRET, b"ledger", True), (bytes(32), b"mesh", True)],
)
def test_blocking_handshakes_agree_on_secret_and_kind_of_server(secret: bytes, kind: bytes, fails: bool) -> None:
    ours, theirs = socket.socketpair()
    deadline = time.monotonic() + WAIT_S
    with ours, theirs, ThreadPoolExecutor(1) as pool:
        serving = pool.submit(server_handshake, theirs, b"mesh")
        if fails:
            with pytest.raises(ProtocolError, match="secret"):
                client_handshake(ours, secret, deadline, kind=kind)
            ours.close()
            with pytest.raises(PeerError):
                serving.result(WAIT_S)
        else:
            client_handshake(ours, secret, deadline, kind=kind)
            serving.result(WAIT_S)
            assert ours.gettimeout() is None
            ours.sendall(b"what follows")
            assert theirs.recv(100) == b"what follows"


def test_a_blocking_handshake_ends_at_its_deadline() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(PeerError, match="in time"):
        client_handshake(ours, SECRET, time.monotonic() + 0.05, kind=b"mesh")


# -- after the proof


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">I", wire.FRAME_BYTES_MAX + 1),
        struct.pack(">I", 0xFFFFFFFF),
        struct.pack(">I", 4) + b"null",
        struct.pack(">I", 4) + b"\xff\xfe\xfd\xfc",
        struct.pack(">I", 20_000) + b"[" * 20_000,
        wire.frame({"id": 1, "op": "shutdown"}),
        wire.frame({"id": 1, "op": "get"}),
        wire.frame({"id": -1, "op": "get", "key": "a"}),
        wire.frame({"id": 1, "op": "put", "key": "a", "value": "not base64!", "lease": 0}),
    ],
)
def test_a_broken_request_is_hung_up_on(stranger: socket.socket, data: bytes) -> None:
    shake(stranger)
    stranger.sendall(data)
    assert hung_up(stranger)


def test_half_a_request_is_hung_up_on(stranger: socket.socket) -> None:
    shake(stranger)
    request = wire.encode_request(wire.Request(id=1, op="get", key="a"))
    stranger.sendall(request + request[:-1])
    assert hung_up(stranger)
    (length,) = struct.unpack(">I", stranger.recv(4))
    assert b'"id":1' in stranger.recv(length), "the whole one before it was answered"


def test_many_requests_at_once_are_answered_in_order(stranger: socket.socket) -> None:
    shake(stranger)
    requests = [wire.encode_request(wire.Request(id=number, op="get", key="a")) for number in range(1, 501)]
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(stranger.sendall, b"".join(requests))
        buffer, answered = bytearray(), list[int]()
        while len(answered) < 500:
            buffer += stranger.recv(65536)
            while (message := wire.take_frame(buffer)) is not None:
                answered.append(message["id"])
        sending.result(WAIT_S)
    assert answered == list(range(1, 501))


def test_a_watcher_that_does_not_read_is_dropped(ledger: EmbeddedLedger, stranger: socket.socket) -> None:
    shake(stranger)
    stranger.sendall(wire.encode_request(wire.Request(id=1, op="watch", prefix="", revision=1)))
    for index in range(10):
        ledger.put("large", bytes([index]) * VALUE_BYTES_MAX)
    assert hung_up(stranger)


def test_a_reader_that_does_not_read_is_dropped(ledger: EmbeddedLedger, stranger: socket.socket) -> None:
    for index in range(10):
        ledger.put(f"large/{index}", bytes(VALUE_BYTES_MAX))
    shake(stranger)
    stranger.sendall(wire.encode_request(wire.Request(id=1, op="read", prefix="large/")))
    assert hung_up(stranger)


def test_an_idle_client_is_left_alone(ledger: EmbeddedLedger, stranger: socket.socket) -> None:
    shake(stranger)
    assert not hung_up(stranger, 0.6)  # twice as long as every patience


def test_connections_are_bounded(ledger: EmbeddedLedger, socket_path: Path) -> None:
    others = [connected(socket_path) for _ in range(LIMITS.connections_max - 1)]
    for sock in others:
        shake(sock)
    with connected(socket_path) as one_too_many:
        assert hung_up(one_too_many)
    with closing(EmbeddedLedger(socket_path, SECRET, timeout_s=0.2)) as late, pytest.raises(LedgerUnavailable):
        late.get("a")
    others.pop().close()
    with closing(EmbeddedLedger(socket_path, SECRET, timeout_s=WAIT_S)) as late:
        assert late.get("a") is not None
    for sock in others:
        sock.close()


def test_strangers_who_wait_crowd_out_each_other_alone(tmp_path: Path, socket_path: Path) -> None:
    """More of them than it has room for, and it would be patient; nobody who knows the secret is turned away."""
    limits = ServerLimits(connections_max=8, unproven_max=4, patience=ConnectionPatience(handshake_s=10 * WAIT_S))
    server = EmbeddedServer(tmp_path / "ledger", socket_path, SECRET, limits=limits)
    server.start()
    friends = [connected(socket_path) for _ in range(2)]
    for sock in friends:
        shake(sock)
    for _ in range(5):
        strangers = [connected(socket_path) for _ in range(30)]
        with closing(EmbeddedLedger(socket_path, SECRET, timeout_s=WAIT_S)) as late:
            assert late.get("a") is None
        assert all(hung_up(sock) for sock in strangers[:-4])
        assert not any(hung_up(sock, 0) for sock in strangers[-3:]), "only as many as there is no room for"
        for sock in strangers:
            sock.close()
    for sock in friends:
        assert not hung_up(sock, 0)
        sock.close()
    server.stop()


# -- the socket


def test_the_socket_is_for_this_user_alone(server: EmbeddedServer, socket_path: Path) -> None:
    assert stat.S_IMODE(socket_path.stat().st_mode) == 0o600
    assert server.address == f"unix:{socket_path}"
    server.stop()
    assert not socket_path.exists()
    server.stop()


def test_a_stale_socket_is_replaced(tmp_path: Path, socket_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(os.fspath(socket_path))
    server = EmbeddedServer(tmp_path, socket_path, SECRET)
    server.start()
    with closing(EmbeddedLedger(socket_path, SECRET)) as ledger:
        assert ledger.get("a") is None
    server.stop()


def test_what_is_not_stale_is_not_replaced(tmp_path: Path, server: EmbeddedServer, socket_path: Path) -> None:
    with pytest.raises(ConfigError, match="in use"):
        EmbeddedServer(tmp_path / "other", socket_path, SECRET).start()
    plain = tmp_path / "plain"
    plain.write_text("not a socket")
    with pytest.raises(ConfigError, match="in use"):
        EmbeddedServer(tmp_path / "other", plain, SECRET).start()
    assert plain.read_text() == "not a socket"


def test_wrong_arguments_come_with_a_hint(tmp_path: Path, socket_path: Path) -> None:
    attempts: list[Callable[[], object]] = [
        lambda: EmbeddedServer(tmp_path, Path("/tmp") / ("x" * 110), SECRET),
        lambda: EmbeddedLedger(Path("/tmp") / ("x" * 110), SECRET),
        lambda: EmbeddedServer(tmp_path, socket_path, b"short"),
        lambda: EmbeddedServer(tmp_path, socket_path.parent / "none" / "s", SECRET).start(),
    ]
    for attempt in attempts:
        with pytest.raises(ConfigError) as error:
            attempt()
        assert error.value.hint


def test_closing_a_ledger_wakes_a_call(tmp_path: Path, socket_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(os.fspath(socket_path))
        listener.listen()
        ledger = EmbeddedLedger(socket_path, SECRET, timeout_s=WAIT_S)
        asked = threading.Event()

        def serve() -> socket.socket:
            sock, _ = listener.accept()
            server_handshake(sock, wire.LEDGER)
            sock.recv(4096)
            asked.set()
            return sock

        with ThreadPoolExecutor(2) as pool:
            serving, calling = pool.submit(serve), pool.submit(ledger.put, "a", b"")
            assert asked.wait(WAIT_S)
            ledger.close()
            with pytest.raises(LedgerUnavailable, match="may or may not"):
                calling.result(WAIT_S / 2)
            serving.result(WAIT_S).close()


# -- the decoder

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(
    st.builds(
        wire.Request,
        id=st.integers(0, 2**63 - 1),
        op=st.just("compare_and_set"),
        key=st.text(max_size=10),
        value=st.binary(max_size=10),
        lease=st.integers(0, 2**63 - 1),
        expected=st.integers(0, 2**63 - 1),
        while_at=st.none() | st.tuples(st.text(max_size=10), st.integers(0, 2**63 - 1)),
    )
)
def test_a_compare_and_set_arrives_as_it_was_sent(request: wire.Request) -> None:
    message = wire.take_frame(bytearray(wire.encode_request(request)))
    assert message is not None and wire.decode_request(message) == request


@pytest.mark.parametrize("garbage", ["view", 7, [], ["view"], ["view", -1], ["view", True], [7, 7], ["view", 7, 7], {}])
def test_a_key_that_must_stand_is_a_text_and_a_revision(garbage: object) -> None:
    message = {"id": 1, "op": "compare_and_set", "key": "a", "value": "", "lease": 0, "expected": 0}
    with pytest.raises(ProtocolError):
        wire.decode_request({**message, "while_at": garbage})


@given(st.sampled_from(sorted(wire.OPERATIONS)), st.data())
def test_decoding_anything_gives_a_request_or_a_protocol_error(op: str, data: st.DataObject) -> None:
    message = {"id": data.draw(json_values | st.just(1)), "op": op}
    message |= {name: data.draw(json_values) for name in wire.OPERATIONS[op]}
    try:
        assert wire.decode_request(message).op == op
    except ProtocolError:
        pass


@given(st.binary(max_size=64))
def test_any_bytes_are_a_frame_or_a_protocol_error_or_not_enough(data: bytes) -> None:
    try:
        wire.take_frame(bytearray(data))
    except ProtocolError:
        pass
