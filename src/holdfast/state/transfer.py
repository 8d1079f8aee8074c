"""Moving a snapshot from several peers to a joiner, in stripes, over connected and authenticated stream sockets.

`serve` answers one joiner from tensor memory. `fetch` asks all peers at once: they take chunks from one list, so a
slow peer delivers fewer, and a peer that fails, stalls or sends wrong bytes leaves its chunk to the others.

Owns: no socket (the caller opens and closes them). `fetch` owns the memory it fills and one thread per peer; a
chunk is written by one thread at a time, and all threads have ended when `fetch` returns or raises.
"""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import xxhash

from holdfast.core.errors import HoldfastError, IntegrityError, PeerError, ProtocolError
from holdfast.state.layout import TensorSpec, allocate
from holdfast.state.snapshot import Snapshot
from holdfast.state.space import Space
from holdfast.state.wire import (
    CHECK_BYTES,
    MANIFEST_BYTES_MAX,
    REPLY_BYTES,
    REQUEST_BYTES,
    SENTENCE_BYTES_MAX,
    SUMMARY_BYTES_MAX,
    Kind,
    Manifest,
    Request,
    Status,
    Summary,
    decode_reply,
    encode_reply,
)

TLS_BYTES = 64 * 1024  # at least this much must be taken in `stall_s`


class Deadline:
    """Bounds every wait of a conversation: `stall_s` without a byte, `total_s` in all."""

    def __init__(self, stall_s: float, total_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._stall_s = stall_s
        self._clock = clock
        self._end = clock() + total_s

    def arm(self, sock: socket.socket) -> None:
        """Limits the socket's next operation."""
        left = self._end - self._clock()
        if left <= 0:
            raise TimeoutError("out of time")
        sock.settimeout(min(self._stall_s, left))


def serve(sock: socket.socket, snapshot: Snapshot, *, stall_s: float = 10.0, total_s: float = 600.0) -> int:
    """Answers a joiner until it says good-bye or hangs up; returns how many tensor bytes were sent.

    Runs in a thread of its own beside the user's loop. PeerError when the joiner stalls or breaks the protocol.
    """
    deadline = Deadline(stall_s, total_s)
    space, sent = Space(snapshot.tensors), 0
    try:
        while True:
            data = _receive_request(sock, deadline)
            if not data:
                return sent
            request = Request.decode(data)
            if request.kind is Kind.BYE:
                return sent
            if request.kind is Kind.SUMMARY:
                _reply(sock, deadline, Summary.of(snapshot).encode())
            elif request.kind is Kind.MANIFEST:
                _reply(sock, deadline, Manifest.of(snapshot).encode())
            elif request.stop > space.nbytes:
                sentence = f"the snapshot has {space.nbytes} bytes, not {request.stop}"
                _reply(sock, deadline, sentence.encode(), Status.REFUSED)
            else:
                _send_range(sock, deadline, snapshot, space, request)
                sent += request.stop - request.start
    except OSError as error:
        raise PeerError(f"the joiner is gone or does not read: {error}") from error


def _send_range(sock: socket.socket, deadline: Deadline, snapshot: Snapshot, space: Space, request: Request) -> None:
    """The digest is the one that the summary was made of: bytes that changed since then are noticed."""
    _send(sock, deadline, [memoryview(encode_reply(Status.OK, request.stop - request.start))])
    for piece in space.pieces(request.start, request.stop):
        _send(sock, deadline, piece)
    known = snapshot.chunk_digests().get((request.start, request.stop))
    _send(sock, deadline, [memoryview(known or space.digest(request.start, request.stop))])


def fetch(
    socks: Sequence[socket.socket],
    *,
    bytes_max: int,
    expect_step: int | None = None,
    names: Sequence[str] | None = None,
    stall_s: float = 10.0,
    total_s: float = 600.0,
    place: Callable[[bytes, Sequence[TensorSpec]], list[torch.Tensor]] | None = None,
) -> Snapshot:
    """The snapshot that all these peers hold. `names` are for messages; `bytes_max` bounds the tensors' memory.

    `place`, given the tree and the tensors' specs, says where the tensors go; by default into memory of their own.
    It is written to while they arrive, so after an error its content is undefined.

    IntegrityError if the peers hold different states or the bytes are not those promised, ProtocolError if the
    snapshot is not of `expect_step` or larger than `bytes_max`, PeerError if no peer is left to ask.
    """
    labels = names or [f"peer {number}" for number in range(len(socks))]
    deadline = Deadline(stall_s, total_s)
    peers = [_Peer(label, sock, deadline) for label, sock in zip(labels, socks, strict=True)]
    _each(peers, lambda peer: peer.ask_summary())
    summary = _agreed(peers, expect_step)
    if summary.nbytes > bytes_max:
        raise ProtocolError(f"a snapshot of {summary.nbytes} bytes where at most {bytes_max} are expected")
    manifest = _first_manifest(peers, summary, bytes_max)
    tensors = place(manifest.tree, manifest.specs) if place else allocate(manifest.specs)
    space = Space(tensors)
    assert space.nbytes == summary.nbytes
    work = _Work(space.chunks())
    _each(_alive(peers), lambda peer: peer.work_off(work, space))
    if not work.finished:
        raise PeerError(f"no peer is left to fetch the snapshot from: {_failures(peers)}")
    for peer in _alive(peers):
        peer.say_goodbye()
    snapshot = Snapshot(summary.step, manifest.tree, tuple(tensors), work.digests)
    if snapshot.digest() != summary.digest:
        raise IntegrityError(
            f"the snapshot of step {summary.step} arrived with the digest {snapshot.digest()}, not {summary.digest}",
            hint="each chunk was right by itself: the peers' states have drifted apart",
        )
    return snapshot


class _Peer:
    """One conversation with a peer; used by one thread at a time. `failure` says why it ended early."""

    def __init__(self, label: str, sock: socket.socket, deadline: Deadline) -> None:
        self.label = label
        self.summary: Summary | None = None
        self.failure: Exception | None = None
        self._sock = sock
        self._deadline = deadline

    def ask_summary(self) -> None:
        try:
            self.summary = Summary.decode(self._ask(Request(Kind.SUMMARY), SUMMARY_BYTES_MAX))
        except (OSError, HoldfastError) as error:
            self.failure = error

    def ask_manifest(self, bytes_max: int) -> Manifest:
        return Manifest.decode(self._ask(Request(Kind.MANIFEST), MANIFEST_BYTES_MAX), bytes_max=bytes_max)

    def work_off(self, work: _Work, space: Space) -> None:
        while chunk := work.take():
            try:
                digest = self._fetch_chunk(chunk, space)
            except (OSError, HoldfastError) as error:
                self.failure = error
                work.give_back(chunk)
                return
            except BaseException:
                work.give_back(chunk)
                raise
            work.done(chunk, digest)

    def say_goodbye(self) -> None:
        try:
            self._deadline.arm(self._sock)
            self._sock.sendall(Request(Kind.BYE).encode())
        except OSError:
            pass  # everything has arrived; a peer that died since is somebody else's business

    def _ask(self, request: Request, length_max: int) -> bytes:
        length = self._answered(request)
        if length > length_max:
            raise ProtocolError(f"{self.label} answered with {length} bytes, at most {length_max} are read")
        return _receive_bytes(self._sock, self._deadline, length)

    def _answered(self, request: Request) -> int:
        """Sends the request; the length of what follows the reply."""
        _send(self._sock, self._deadline, [memoryview(request.encode())])
        status, length = decode_reply(_receive_bytes(self._sock, self._deadline, REPLY_BYTES))
        if status is Status.OK:
            return length
        sentence = _receive_bytes(self._sock, self._deadline, min(length, SENTENCE_BYTES_MAX))
        raise ProtocolError(f"{self.label} refused: {sentence.decode(errors='replace')}")

    def _fetch_chunk(self, chunk: tuple[int, int], space: Space) -> bytes:
        start, stop = chunk
        if self._answered(Request(Kind.RANGE, start, stop)) != stop - start:
            raise ProtocolError(f"{self.label} answered with another number of bytes than asked for")
        hasher = xxhash.xxh3_128()
        for piece in space.pieces(start, stop):
            _receive_into(self._sock, self._deadline, piece)
            for view in piece:
                hasher.update(view)
        if _receive_bytes(self._sock, self._deadline, CHECK_BYTES) != hasher.digest():
            raise IntegrityError(
                f"the bytes {start} to {stop} from {self.label} are not those that it promised",
                hint="they were damaged on their way, or its state changed meanwhile: optimizer.step came too early",
            )
        return hasher.digest()


class _Work:
    """The chunks that nobody has fetched yet, shared by the peers' threads."""

    def __init__(self, chunks: Iterable[tuple[int, int]]) -> None:
        self._changed = threading.Condition()
        self._waiting = deque(chunks)
        self._taken = 0
        self.digests: dict[tuple[int, int], bytes] = {}  # of the chunks that have arrived

    @property
    def finished(self) -> bool:
        return not self._waiting and not self._taken

    def take(self) -> tuple[int, int] | None:
        """The next chunk. While others still fetch, waits: theirs may come back. None when all have arrived."""
        with self._changed:
            # Bounded, because each thread that holds a chunk is bounded by its deadline.
            self._changed.wait_for(lambda: self._waiting or not self._taken)
            if not self._waiting:
                return None
            self._taken += 1
            return self._waiting.popleft()

    def done(self, chunk: tuple[int, int], digest: bytes) -> None:
        with self._changed:
            self.digests[chunk] = digest
            self._taken -= 1
            self._changed.notify_all()

    def give_back(self, chunk: tuple[int, int]) -> None:
        with self._changed:
            self._taken -= 1
            self._waiting.appendleft(chunk)
            self._changed.notify_all()


def _each(peers: Sequence[_Peer], action: Callable[[_Peer], None]) -> None:
    if len(peers) == 1:
        action(peers[0])
        return
    threads = [threading.Thread(target=action, args=(peer,), daemon=True, name="fetch") for peer in peers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()  # bounded by the deadline that each conversation has


def _alive(peers: Iterable[_Peer]) -> list[_Peer]:
    return [peer for peer in peers if peer.failure is None]


def _failures(peers: Iterable[_Peer]) -> str:
    found = [(peer.label, getattr(peer.failure, "message", peer.failure)) for peer in peers if peer.failure]
    return "; ".join(f"{label}: {failure}" for label, failure in found) or "none was given"


def _agreed(peers: Sequence[_Peer], expect_step: int | None) -> Summary:
    answers = [(peer.label, peer.summary) for peer in peers if peer.summary is not None]
    if not answers:
        raise PeerError(f"no peer has a snapshot to give: {_failures(peers)}")
    wrong = [f"{label} (step {s.step})" for label, s in answers if expect_step not in (None, s.step)]
    if wrong:
        raise ProtocolError(f"a snapshot of step {expect_step} was asked for, but {', '.join(wrong)} offered another")
    # Counter keeps the order of arrival among equals: with two peers, the second is the odd one.
    (summary, _), *_ = Counter(summary for _, summary in answers).most_common(1)
    odd = [label for label, other in answers if other != summary]
    if odd:
        raise IntegrityError(
            f"peers do not hold the same state of step {summary.step}: {', '.join(odd)} "
            f"of {', '.join(label for label, _ in answers)} differ",
            hint="their models have drifted apart: look for nondeterministic code or failing hardware there",
        )
    return summary


def _first_manifest(peers: Sequence[_Peer], summary: Summary, bytes_max: int) -> Manifest:
    for peer in _alive(peers):
        try:
            manifest = peer.ask_manifest(bytes_max)
            if manifest.summary != summary:
                raise ProtocolError(f"{peer.label} has a manifest that contradicts its summary")
            return manifest
        except (OSError, HoldfastError) as error:
            peer.failure = error
    raise PeerError(f"no peer has a snapshot to give: {_failures(peers)}")


def _reply(sock: socket.socket, deadline: Deadline, payload: bytes, status: Status = Status.OK) -> None:
    _send(sock, deadline, [memoryview(encode_reply(status, len(payload))), memoryview(payload)])


def _send(sock: socket.socket, deadline: Deadline, views: list[memoryview]) -> None:
    while views:
        deadline.arm(sock)
        # TLS neither gathers nor says how far it is within a call.
        tls = isinstance(sock, ssl.SSLSocket)
        views = _rest(views, sock.send(views[0][:TLS_BYTES]) if tls else sock.sendmsg(views))


def _receive_into(sock: socket.socket, deadline: Deadline, views: list[memoryview]) -> None:
    while views:
        deadline.arm(sock)
        if isinstance(sock, ssl.SSLSocket):
            received = sock.recv_into(views[0])
        else:
            received, *_ = sock.recvmsg_into(views)
        if not received:
            raise PeerError("the connection ended in the middle of a message")
        views = _rest(views, received)


def _rest(views: list[memoryview], moved: int) -> list[memoryview]:
    for index, view in enumerate(views):
        if moved < len(view):
            return [view[moved:], *views[index + 1 :]]
        moved -= len(view)
    return []


def _receive_bytes(sock: socket.socket, deadline: Deadline, length: int) -> bytes:
    buffer = bytearray(length)
    if length:
        _receive_into(sock, deadline, [memoryview(buffer)])
    return bytes(buffer)


def _receive_request(sock: Any, deadline: Deadline) -> bytes:
    """One request, or nothing if the joiner hung up between two."""
    deadline.arm(sock)
    first: bytes = sock.recv(REQUEST_BYTES)
    if not first or len(first) == REQUEST_BYTES:
        return first
    return first + _receive_bytes(sock, deadline, REQUEST_BYTES - len(first))
