"""Moving a snapshot from several peers to a joiner, in stripes, over connected and authenticated stream sockets.

`serve` answers one joiner from tensor memory, `fetch` asks all peers at once (net/striping.py). A peer has three things
to give: a summary, on which all must agree before anything moves, a manifest (wire.py), and the tensors, as one run of
bytes (space.py).

Owns: no socket (the caller opens and closes them). `fetch` owns the memory it fills.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch

from holdfast.core.errors import IntegrityError, NotStored, PeerError, ProtocolError, StatesDiffer
from holdfast.net.byte_ranges import STALL_S, TOTAL_S, ByteReader, Offer, serve_bytes
from holdfast.net.kernel import SYSTEM, Kernel
from holdfast.net.streams import Deadline
from holdfast.net.striping import Peers
from holdfast.state.layout import TensorSpec, allocate
from holdfast.state.snapshot import Snapshot
from holdfast.state.space import Space
from holdfast.state.wire import MANIFEST_BYTES_MAX, SUMMARY_BYTES_MAX, Summary, TransferManifest

SUMMARY, MANIFEST, TENSORS = "summary", "manifest", "tensors"


class _Tensors(Offer):
    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot
        self._space = Space(snapshot.tensors)
        self.nbytes = self._space.nbytes

    def pieces(self, start: int, stop: int) -> Iterable[list[memoryview]]:
        return self._space.pieces(start, stop)

    def digest(self, start: int, stop: int) -> bytes | None:
        """The one that the summary was made of: bytes that changed since then are noticed."""
        return self._snapshot.chunk_digests().get((start, stop))


def serve(
    sock: socket.socket,
    snapshot: Snapshot,
    *,
    is_offered: Callable[[], bool] = lambda: True,
    stall_s: float = STALL_S,
    total_s: float = TOTAL_S,
) -> int:
    """Answers a joiner until it hangs up; how many bytes were sent.

    Runs in a thread of its own beside the user's loop. A snapshot refers to live memory: `is_offered` says whether that
    is still as it was. Nothing that was made of it after it changed is given away, the digest least of all: a joiner
    that was stopped before it asked would take another state for this one. PeerError when the joiner stalls or breaks
    the protocol.
    """
    snapshot = snapshot.on_host()
    tensors = _Tensors(snapshot)

    def find(name: str) -> Offer:
        if name == TENSORS:
            return tensors  # what has changed since the summary was made does not fit its digests
        if name not in (SUMMARY, MANIFEST):
            raise NotStored(f"a snapshot has no {name[:40]!r}")
        made = (Summary if name == SUMMARY else TransferManifest).of(snapshot).encode()
        if not is_offered():  # asked for when all of it was read
            raise NotStored(f"the state of step {snapshot.step} is not offered any more")
        return Offer(made)

    return serve_bytes(sock, find, stall_s=stall_s, total_s=total_s)


def fetch(
    socks: Sequence[socket.socket],
    *,
    bytes_max: int,
    expect_step: int | None = None,
    names: Sequence[str] | None = None,
    stall_s: float = STALL_S,
    total_s: float = TOTAL_S,
    place: Callable[[bytes, Sequence[TensorSpec]], list[torch.Tensor]] | None = None,
    kernel: Kernel = SYSTEM,
) -> Snapshot:
    """The snapshot that all these peers hold. `names` are for messages; `bytes_max` bounds the tensors' memory.

    `place`, given the tree and the tensors' specs, says where the tensors go; by default into memory of their own.
    It is written to while they arrive, so after an error its content is undefined.

    StatesDiffer if the peers hold different states, and then nothing is written; IntegrityError if the bytes are not
    those promised, ProtocolError if the snapshot is not of `expect_step` or larger than `bytes_max`, PeerError if no
    peer is left to ask.
    """
    labels = names or [f"peer {number}" for number in range(len(socks))]
    peers = Peers(socks, labels, Deadline(stall_s, total_s), kernel)
    summary = _agreed(peers, expect_step)
    if summary.nbytes > bytes_max:
        raise ProtocolError(f"a snapshot of {summary.nbytes} bytes where at most {bytes_max} are expected")
    manifest = _manifest(peers, summary, bytes_max)
    tensors = place(manifest.tree, manifest.specs) if place else allocate(manifest.specs)
    space = Space(tensors)
    assert space.nbytes == summary.nbytes
    digests = peers.fetch(TENSORS, space.chunks(), space.pieces)
    snapshot = Snapshot(summary.step, manifest.tree, tuple(tensors), digests)
    if snapshot.digest() != summary.digest:
        raise IntegrityError(
            f"the snapshot of step {summary.step} arrived with the digest {snapshot.digest()}, not {summary.digest}",
            hint="each chunk was right by itself: the peers' states have drifted apart",
        )
    return snapshot


def _agreed(peers: Peers, expect_step: int | None) -> Summary:
    answers = peers.ask_all(lambda reader: Summary.decode(reader.read(SUMMARY, SUMMARY_BYTES_MAX)))
    if not answers:
        raise PeerError(f"no peer has a snapshot to give: {peers.failures()}")
    wrong = [f"{label} (step {s.step})" for label, s in answers if expect_step not in (None, s.step)]
    if wrong:
        raise ProtocolError(f"a snapshot of step {expect_step} was asked for, but {', '.join(wrong)} offered another")
    # Counter keeps the order of arrival among equals: with two peers, the second is the odd one.
    (summary, _), *_ = Counter(summary for _, summary in answers).most_common(1)
    odd = [label for label, other in answers if other != summary]
    if odd:
        raise StatesDiffer(
            f"peers do not hold the same state of step {summary.step}: {', '.join(odd)} "
            f"of {', '.join(label for label, _ in answers)} differ",
            hint="their models have drifted apart: look for nondeterministic code or failing hardware there",
        )
    return summary


def _manifest(peers: Peers, summary: Summary, bytes_max: int) -> TransferManifest:
    def ask(reader: ByteReader) -> TransferManifest:
        manifest = TransferManifest.decode(reader.read(MANIFEST, MANIFEST_BYTES_MAX), bytes_max=bytes_max)
        if manifest.summary != summary:
            raise ProtocolError("a manifest that contradicts its summary")
        return manifest

    manifest = peers.ask_first(ask)
    if manifest is None:
        raise PeerError(f"no peer has a snapshot to give: {peers.failures()}")
    return manifest
