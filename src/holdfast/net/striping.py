"""The same bytes from several peers at once: they take chunks from one list, so a slow peer delivers fewer, and a peer
that fails, stalls or sends wrong bytes leaves its chunk to the others.

Owns one thread per peer; a chunk is written by one thread at a time, and all threads have ended when a call returns or
raises. The caller opens and closes the sockets.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TypeVar

from holdfast.core.errors import HoldfastError, PeerError
from holdfast.net.byte_ranges import ByteReader
from holdfast.net.kernel import SYSTEM, Kernel
from holdfast.net.streams import Deadline

Chunk = tuple[int, int]
Answer = TypeVar("Answer")


class Peers:
    """Conversations with peers that have the same to give. Those that fail are not asked again."""

    def __init__(
        self, socks: Sequence[socket.socket], labels: Sequence[str], deadline: Deadline, kernel: Kernel = SYSTEM
    ) -> None:
        self._kernel = kernel
        self._readers = {label: ByteReader(sock, deadline) for label, sock in zip(labels, socks, strict=True)}
        self._failures: dict[str, Exception] = {}

    def failures(self) -> str:
        found = [f"{label}: {getattr(error, 'message', error)}" for label, error in self._failures.items()]
        return "; ".join(sorted(found)) or "none was given"

    def ask_all(self, question: Callable[[ByteReader], Answer]) -> list[tuple[str, Answer]]:
        """What those answered who did, each with its label, in their order."""
        answers: dict[str, Answer] = {}
        self._each(lambda label, reader: answers.update({label: question(reader)}))
        return [(label, answers[label]) for label in self._readers if label in answers]

    def ask_first(self, question: Callable[[ByteReader], Answer]) -> Answer | None:
        """The answer of the first that gives one."""
        for label, reader in self._alive():
            try:
                return question(reader)
            except (OSError, HoldfastError) as error:
                self._failures[label] = error
        return None

    def fetch(
        self, name: str, chunks: Iterable[Chunk], memory: Callable[[int, int], Iterable[list[memoryview]]]
    ) -> dict[Chunk, bytes]:
        """Fill the memory of all chunks; their digests. PeerError if no peer is left to ask."""
        work = _Work(chunks, self._kernel)
        self._each(lambda _, reader: _work_off(reader, name, work, memory))
        if not work.finished:
            raise PeerError(f"no peer is left to fetch the {name} from: {self.failures()}")
        return work.digests

    def _alive(self) -> list[tuple[str, ByteReader]]:
        return [(label, reader) for label, reader in self._readers.items() if label not in self._failures]

    def _each(self, action: Callable[[str, ByteReader], object]) -> None:
        def act(label: str, reader: ByteReader) -> None:
            try:
                action(label, reader)
            except (OSError, HoldfastError) as error:
                self._failures[label] = error

        alive = self._alive()
        if len(alive) == 1:
            act(*alive[0])
            return
        threads = [self._kernel.start("fetch", partial(act, *one)) for one in alive]
        for thread in threads:
            thread.join()  # bounded by the deadline that each conversation has


class _Work:
    """The chunks that nobody has fetched yet, shared by the peers' threads."""

    def __init__(self, chunks: Iterable[Chunk], kernel: Kernel) -> None:
        self._changed = kernel.condition()
        self._waiting = deque(chunks)
        self._taken = 0
        self.digests: dict[Chunk, bytes] = {}  # of the chunks that have arrived

    @property
    def finished(self) -> bool:
        return not self._waiting and not self._taken

    def take(self) -> Chunk | None:
        """The next chunk. While others still fetch, waits: theirs may come back. None when all have arrived."""
        with self._changed:
            # Bounded, because each thread that holds a chunk is bounded by its deadline.
            self._changed.wait_for(lambda: self._waiting or not self._taken)
            if not self._waiting:
                return None
            self._taken += 1
            return self._waiting.popleft()

    def done(self, chunk: Chunk, digest: bytes) -> None:
        with self._changed:
            self.digests[chunk] = digest
            self._taken -= 1
            self._changed.notify_all()

    def give_back(self, chunk: Chunk) -> None:
        with self._changed:
            self._taken -= 1
            self._waiting.appendleft(chunk)
            self._changed.notify_all()


def _work_off(
    reader: ByteReader, name: str, work: _Work, memory: Callable[[int, int], Iterable[list[memoryview]]]
) -> None:
    while chunk := work.take():
        try:
            digest = reader.read_into(name, *chunk, memory(*chunk))
        except BaseException:
            work.give_back(chunk)
            raise
        work.done(chunk, digest)
