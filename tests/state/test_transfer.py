"""Moving a snapshot: from one peer or several, past peers that die, stall or lie; hostile bytes at every decoder."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.errors import HoldfastError, IntegrityError, PeerError, ProtocolError
from holdfast.net.byte_ranges import Request, Status, decode_reply, encode_reply
from holdfast.state import transfer
from holdfast.state.codec import flatten, pack_tree, unflatten, unpack_tree
from holdfast.state.snapshot import Snapshot
from holdfast.state.transfer import fetch, serve
from holdfast.state.wire import Summary, TransferManifest

MIB = 2**20


def snapshot(step: int = 3, scale: float = 1.0, floats: int = 700_000) -> Snapshot:
    values = {
        "large": torch.arange(floats, dtype=torch.float32) * scale,
        "turned": torch.arange(600, dtype=torch.bfloat16).view(20, 30).T,
        "tiny": [torch.tensor(number) for number in range(300)],
        "empty": torch.empty(3, 0),
        "flags": torch.tensor([True, False]),
        "lr": 0.1,
    }
    tree, tensors = flatten(values)
    return Snapshot(step, pack_tree(tree), tuple(tensors))


BIG = 50_000_000
Server = Callable[[socket.socket], Any]


@contextmanager
def served(*servers: Server) -> Iterator[list[socket.socket]]:
    """Each server runs in a thread at the other end of a socket of the list."""
    pairs = [socket.socketpair() for _ in servers]

    def run(server: Server, sock: socket.socket) -> None:
        with sock, suppress(HoldfastError, OSError):
            server(sock)

    threads = [
        threading.Thread(target=run, args=(server, theirs)) for server, (_, theirs) in zip(servers, pairs, strict=True)
    ]
    for thread in threads:
        thread.start()
    try:
        yield [mine for mine, _ in pairs]
    finally:
        for mine, _ in pairs:
            mine.close()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()


def good(held: Snapshot) -> Server:
    return lambda sock: serve(sock, held, stall_s=5)


class Tampering:
    """A socket that does something to what is sent through it once enough bytes have passed."""

    def __init__(self, sock: socket.socket, after: int, deed: Callable[[socket.socket], None] | None) -> None:
        self._sock = sock
        self._left = after
        self._deed = deed

    def sendmsg(self, views: list[memoryview]) -> int:
        self._left -= sum(map(len, views))
        if self._left < 0:
            if self._deed is not None:
                self._deed(self._sock)
            else:
                damaged = bytearray(views[-1])
                damaged[-1] ^= 1
                views = [*views[:-1], memoryview(damaged)]
        return self._sock.sendmsg(views)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


class Impatient:
    """A socket that is waited for only shortly; others are not, since a good peer may be slow on a busy machine."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def settimeout(self, timeout_s: float) -> None:
        self._sock.settimeout(min(timeout_s, 0.3))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


def bad(held: Snapshot, after: int, deed: Callable[[socket.socket], None] | None) -> Server:
    return lambda sock: serve(Tampering(sock, after, deed), held, stall_s=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("peers", [1, 2, 3, 5])
def test_a_snapshot_arrives_as_it_was(peers: int) -> None:
    held = snapshot()
    with served(*[good(held)] * peers) as socks:
        got = fetch(socks, bytes_max=BIG, expect_step=3)
    assert (got.step, got.tree, got.nbytes, got.digest()) == (3, held.tree, held.nbytes, held.digest())
    values = unflatten(unpack_tree(got.tree), got.tensors)
    assert values["lr"] == 0.1 and values["turned"].stride() == (1, 30) and values["empty"].shape == (3, 0)
    assert torch.equal(values["large"], held.tensors[0])


def test_a_snapshot_without_tensors_arrives() -> None:
    held = Snapshot(0, pack_tree({"d": []}), ())
    with served(good(held), good(held)) as socks:
        assert fetch(socks, bytes_max=0).digest() == held.digest()


def test_a_slow_peer_delivers_less(monkeypatch: pytest.MonkeyPatch) -> None:
    held, sent = snapshot(floats=4_000_000), {}

    def count(name: str, delay_s: float) -> Server:
        def run(sock: socket.socket) -> None:
            sent[name] = serve(Tampering(sock, 2000, lambda _: time.sleep(delay_s)), held)  # type: ignore[arg-type]

        return run

    with served(count("fast", 0), count("slow", 0.1)) as socks:
        got = fetch(socks, bytes_max=BIG)
    assert got.digest() == held.digest()
    beside = 2 * len(Summary.of(held).encode()) + len(TransferManifest.of(held).encode())
    assert sent["slow"] < sent["fast"] and sum(sent.values()) == held.nbytes + beside


@pytest.mark.parametrize("after", [0, 300, 20_000, 1_500_000])
@pytest.mark.parametrize(
    "deed",
    [None, lambda sock: sock.shutdown(socket.SHUT_RDWR), lambda sock: time.sleep(1.0)],
    ids=["corrupts", "dies", "stalls"],
)
def test_chunks_of_a_failing_peer_come_from_another(after: int, deed: Any) -> None:
    held = snapshot()
    with served(bad(held, after, deed), good(held)) as socks:
        impatient = Impatient(socks[0])
        assert fetch([impatient, socks[1]], bytes_max=BIG).digest() == held.digest()  # type: ignore[list-item]


def test_when_no_peer_is_left_the_error_says_what_became_of_each() -> None:
    held = snapshot()
    with (
        served(bad(held, 100_000, None), bad(held, 100_000, lambda sock: sock.shutdown(socket.SHUT_RDWR))) as socks,
        pytest.raises(PeerError, match=r"no peer is left.*w1\.1: the bytes .* are not those.*w2\.1: "),
    ):
        fetch(socks, bytes_max=BIG, names=["w1.1", "w2.1"])
    with pytest.raises(PeerError, match="no peer has a snapshot to give"):
        fetch([], bytes_max=BIG)


def test_peers_that_disagree_are_named() -> None:
    servers = [good(snapshot()), good(snapshot(scale=2.0)), good(snapshot())]
    with served(*servers) as socks, pytest.raises(IntegrityError, match=r"state of step 3: b of a, b, c differ"):
        fetch(socks, bytes_max=BIG, names=["a", "b", "c"])


def test_another_step_is_refused() -> None:
    with (
        served(good(snapshot(3)), good(snapshot(4))) as socks,
        pytest.raises(ProtocolError, match=r"of step 3 was asked for, but peer 1 \(step 4\)"),
    ):
        fetch(socks, bytes_max=BIG, expect_step=3)


def test_a_snapshot_larger_than_expected_is_refused_before_it_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "allocate", lambda specs: pytest.fail("allocated"))
    held = snapshot()
    with served(good(held)) as socks, pytest.raises(ProtocolError, match="at most 1000 are expected"):
        fetch(socks, bytes_max=1000)


def test_a_state_that_changed_meanwhile_is_noticed() -> None:
    held = snapshot()
    held.digest()
    held.tensors[0][0] = 7.0  # optimizer.step() came too early
    with served(good(held)) as socks, pytest.raises(PeerError, match="not those that were promised"):
        fetch(socks, bytes_max=BIG)


def test_a_server_refuses_what_is_not_there_and_does_not_wait_for_ever() -> None:
    held = snapshot()
    with served(good(held)) as (sock,):
        sock.sendall(Request("tensors", 0, held.nbytes + 1).encode())
        status, length = decode_reply(sock.recv(9))
        assert status is Status.REFUSED and b"fewer than" in sock.recv(length)
        sock.sendall(Request("secrets").encode())
        status, length = decode_reply(sock.recv(9))
        assert status is Status.MISSING and b"has no 'secrets'" in sock.recv(length)
    mine, theirs = socket.socketpair()
    with mine, theirs:
        with pytest.raises(PeerError, match="gone or does not read"):
            serve(theirs, held, stall_s=0.05)
        mine.sendall(Request("tensors", 0, held.nbytes).encode())
        with pytest.raises(PeerError, match="gone or does not read"):
            serve(theirs, held, stall_s=0.05)  # nobody reads
        mine.close()
        with suppress(PeerError):
            serve(theirs, held)


SMALL = snapshot(floats=10)
MANIFEST = TransferManifest.of(SMALL).encode()


def reply(data: bytes) -> bytes:
    return encode_reply(Status.OK, len(data)) + data + xxhash.xxh3_128_digest(data)


@settings(max_examples=80, deadline=None)
@given(
    st.one_of(
        st.binary(max_size=60),
        st.binary(max_size=60).map(lambda data: encode_reply(Status.OK, len(data)) + data),
        st.integers(0, 2**64 - 1).map(lambda length: encode_reply(Status.OK, length)),
        st.integers(0, 2**64 - 1).map(lambda length: encode_reply(Status.REFUSED, length)),
        st.binary(max_size=60).map(
            lambda data: (
                reply(Summary.of(SMALL).encode()) + reply(MANIFEST) + encode_reply(Status.OK, SMALL.nbytes) + data
            )
        ),
    )
)
def test_hostile_answers_get_a_typed_error(data: bytes) -> None:
    mine, theirs = socket.socketpair()
    with mine, theirs:
        theirs.sendall(data)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises((PeerError, IntegrityError)):
            fetch([mine], bytes_max=BIG, stall_s=1)


heads = st.fixed_dictionaries(
    {},
    optional={
        "step": st.one_of(st.integers(), st.none(), st.text(max_size=3)),
        "bytes": st.one_of(st.integers(), st.sampled_from([0, 4, 2**63]), st.booleans()),
        "digest": st.one_of(st.just("0" * 32), st.text(max_size=40), st.none()),
        "tensors": st.one_of(
            st.none(),
            st.lists(st.sampled_from([["float32", [1]], ["float32", [2**62]], ["x", []], [], 3, ["bool", [0, 2**62]]])),
        ),
    },
)


@settings(max_examples=300)
@given(heads, st.binary(max_size=10), st.integers(-3, 3))
def test_hostile_manifests_get_a_typed_error_and_promise_no_more_than_allowed(
    head: dict[str, Any], tree: bytes, lie: int
) -> None:
    data = json.dumps(head).encode()
    try:
        manifest = TransferManifest.decode(struct.pack("!I", max(0, len(data) + lie)) + data + tree, bytes_max=1000)
    except ProtocolError:
        return
    assert sum(spec.nbytes for spec in manifest.specs) == manifest.summary.nbytes <= 1000


@settings(max_examples=200)
@given(st.integers(0, len(MANIFEST) - 1), st.integers(0, 255), st.integers(0, len(MANIFEST)))
def test_damaged_manifests_get_a_typed_error_or_still_add_up(place: int, byte: int, end: int) -> None:
    data = bytearray(MANIFEST)
    data[place] = byte
    for attempt in (bytes(data), bytes(data[:end])):
        try:
            manifest = TransferManifest.decode(attempt, bytes_max=BIG)
            unflatten(unpack_tree(manifest.tree), SMALL.tensors)
        except ProtocolError:
            continue
        assert sum(spec.nbytes for spec in manifest.specs) == manifest.summary.nbytes


@given(st.binary(max_size=100))
def test_hostile_summaries_get_a_typed_error(data: bytes) -> None:
    with suppress(ProtocolError):
        Summary.decode(data)


def test_summaries_come_back() -> None:
    summary = Summary.of(SMALL)
    assert Summary.decode(summary.encode()) == summary
    assert TransferManifest.decode(MANIFEST, bytes_max=BIG) == TransferManifest.of(SMALL)


@pytest.mark.parametrize("withdrawn_after", [0, 1], ids=["before it asks", "between summary and manifest"])
def test_what_is_not_offered_any_more_is_not_given(withdrawn_after: int) -> None:
    """It refers to live memory: a summary of what that has become would be taken for this state's."""
    held, asked = snapshot(floats=1000), [0]

    def is_offered() -> bool:
        asked[0] += 1
        return asked[0] <= withdrawn_after

    refused = pytest.raises(PeerError, match=r"no peer has a snapshot to give: .*step 3 is not offered any more")
    with served(lambda sock: serve(sock, held, is_offered=is_offered, stall_s=5)) as socks, refused:
        fetch(socks, bytes_max=BIG)


def test_bytes_that_change_after_the_summary_are_noticed() -> None:
    held = snapshot(floats=1000)

    def is_offered() -> bool:
        held.tensors[0].add_(1.0)  # the loop goes on as soon as the summary is made
        return True

    noticed = pytest.raises((IntegrityError, PeerError))
    with served(lambda sock: serve(sock, held, is_offered=is_offered, stall_s=5)) as socks, noticed:
        fetch(socks, bytes_max=BIG)
