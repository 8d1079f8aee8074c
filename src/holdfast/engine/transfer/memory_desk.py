"""What a host keeps in memory, for workers of other hosts to read (net/byte_ranges.py).

There is a listing, and there are files. Only names of a snapshot's files are served, only whole ranges of what is
there, and nothing is ever written. The server is a thread of the listener's for each connection; a reader has as many
connections as it has threads that read at the same time.
"""

from __future__ import annotations

import builtins
import json
import os
import queue
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from holdfast.checkpoint.format.manifest import step_of
from holdfast.checkpoint.storage.local import LocalStorage
from holdfast.checkpoint.storage.names import is_name
from holdfast.checkpoint.storage.port import Stored
from holdfast.core.errors import (
    HoldfastError,
    IntegrityError,
    NotStored,
    PeerError,
    ProtocolError,
    StorageRefused,
    StorageUnavailable,
)
from holdfast.net.byte_ranges import BLOCK_BYTES, ByteReader, Offer, blocks, serve_bytes
from holdfast.net.streams import Deadline

MEMORY = "memory"  # the purpose of these connections; their Hello has no number
LISTING = "listing"  # no name of a file
LISTING_BYTES_MAX = 16 << 20
STALL_S, TOTAL_S = 10.0, 600.0


class _File(Offer):
    """Read rather than mapped: a file that gets shorter meanwhile must not cost us the process."""

    def __init__(self, root: Path, name: str) -> None:
        try:
            self._file = os.open(root / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise NotStored(f"there is no {name}: {error.strerror}") from error
        status = os.fstat(self._file)
        self.nbytes = status.st_size
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise NotStored(f"{name} is not a file")

    def pieces(self, start: int, stop: int) -> Iterator[list[memoryview]]:
        block = memoryview(bytearray(min(BLOCK_BYTES, stop - start)))
        while start < stop:
            count = os.preadv(self._file, [block[: min(len(block), stop - start)]], start)
            if not count:
                raise PeerError("a file got shorter while it was read")
            yield [block[:count]]
            start += count

    def close(self) -> None:
        os.close(self._file)


def serve_memory(sock: socket.socket, root: Path) -> None:
    """Answer one reader until it hangs up. PeerError for what no worker would ask."""

    def find(name: str) -> Offer:
        if name == LISTING:
            listed = [[entry.name, entry.size] for entry in LocalStorage(root).list("checkpoint-")]
            data = json.dumps(listed, separators=(",", ":")).encode()
            if len(data) > LISTING_BYTES_MAX:
                raise StorageRefused(f"a listing of {len(data)} bytes")
            return Offer(data)
        if not is_name(name) or step_of(name) is None:
            raise ProtocolError(f"a request for the file {name[:40]!r}")
        return _File(root, name)

    serve_bytes(sock, find, stall_s=STALL_S, total_s=TOTAL_S)


class RemoteMemory:
    """The memory of another host as a storage that is only read. `dial` opens one more connection to a worker there."""

    def __init__(self, host: str, dial: Callable[[], socket.socket]) -> None:
        self.uri = f"memory of {host}"
        self.writers = 1
        self.block_bytes = 8 << 20
        self._host = host
        self._dial = dial
        self._idle: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        self._closed = threading.Event()

    def list(self, prefix: str = "") -> builtins.list[Stored]:
        data = self._ask(lambda reader: reader.read(LISTING, LISTING_BYTES_MAX))
        try:
            found = json.loads(data)
            listed = [Stored(name, size) for name, size in (found if isinstance(found, builtins.list) else [found])]
        except (ValueError, TypeError, RecursionError) as error:
            raise StorageUnavailable(f"{self.uri}: it sent no listing") from error
        if not all(isinstance(one.name, str) and is_name(one.name) and type(one.size) is int for one in listed):
            raise StorageUnavailable(f"{self.uri}: it sent no listing")
        return sorted((one for one in listed if one.name.startswith(prefix)), key=lambda one: one.name)

    def read(self, name: str, bytes_max: int) -> bytes:
        return self._ask(lambda reader: reader.read(name, bytes_max))

    def read_into(self, name: str, memory: memoryview, offset: int = 0) -> None:
        if len(memory):
            self._ask(lambda reader: reader.read_into(name, offset, offset + len(memory), blocks(memory)))

    def write(self, name: str, data: memoryview) -> None:
        raise StorageRefused(f"{self.uri} is only read from here")

    def create(self, name: str, data: bytes) -> bool:
        raise StorageRefused(f"{self.uri} is only read from here")

    def delete(self, name: str) -> None:
        raise StorageRefused(f"{self.uri} is only read from here")

    def close(self) -> None:
        self._closed.set()
        while True:
            try:
                self._idle.get_nowait().close()
            except queue.Empty:
                return

    def is_there(self) -> bool:
        """Whether a connection can be had, which is then kept for what is to be read."""
        try:
            self._idle.put(self._dial())
        except HoldfastError:
            return False
        return True

    def _ask(self, question: Callable[[ByteReader], bytes]) -> bytes:
        try:
            sock = self._idle.get_nowait()
        except queue.Empty:
            try:
                sock = self._dial()
            except HoldfastError as error:
                raise StorageUnavailable(f"{self.uri}: {error.message}") from error
        try:
            answer = question(ByteReader(sock, Deadline(STALL_S, TOTAL_S)))
        except (NotStored, IntegrityError) as error:
            self._keep(sock)
            raise type(error)(f"{self.uri}: {error.message}") from error
        except BaseException as error:
            sock.close()  # where it stands within an answer nobody knows
            if isinstance(error, OSError | HoldfastError):
                reason = error.message if isinstance(error, HoldfastError) else str(error)
                raise StorageUnavailable(f"{self.uri}: {reason}") from error
            raise
        self._keep(sock)
        return answer

    def _keep(self, sock: socket.socket) -> None:
        """For the next question, unless it was closed meanwhile."""
        self._idle.put(sock)
        if self._closed.is_set():
            self.close()
