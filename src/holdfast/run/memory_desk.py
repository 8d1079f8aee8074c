"""What a host keeps in memory, for workers of other hosts to read: both sides of a small protocol.

A request is a JSON object after its length: `{"op": "list"}`, or `{"op": "read", "name", "offset", "length"}`. The
answer is one byte that says how it went, a length, and that many bytes: the listing, what was read, or a sentence.
Only names of a snapshot's files are served, only whole ranges of what is there, and nothing is ever written.

The server is a thread of the listener's for each connection; a reader has as many connections as it has threads that
read at the same time. The connections have proved before that they belong to the run.
"""

from __future__ import annotations

import builtins
import json
import os
import queue
import socket
import stat
import struct
import threading
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from types import NoneType
from typing import Any

from holdfast.checkpoint.fragments import FILE_BYTES_MAX
from holdfast.checkpoint.manifest import step_of
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
from holdfast.core.words import decode_json, encode_json
from holdfast.state.transfer import Deadline

REQUEST_BYTES_MAX = 4096
LISTING_BYTES_MAX = 16 << 20
SENTENCE_BYTES_MAX = 1000
STALL_S, TOTAL_S = 10.0, 600.0
BLOCK_BYTES = 1 << 20  # at a time, so that each has its deadline
_LENGTH = struct.Struct(">I")
_ANSWER = struct.Struct(">BQ")


class Status(IntEnum):
    OK = 0
    NOT_STORED = 1
    REFUSED = 2


def serve_memory(sock: socket.socket, root: Path) -> None:
    """Answer one reader until it hangs up. PeerError for what no worker would ask."""
    deadline = Deadline(STALL_S, TOTAL_S)
    try:
        while (head := _receive(sock, deadline, _LENGTH.size, at_start=True)) is not None:
            (length,) = _LENGTH.unpack(head)
            if not 0 < length <= REQUEST_BYTES_MAX:
                raise ProtocolError(f"a request of {length} bytes")
            request = decode_json(bytes(_receive(sock, deadline, length) or b""))
            try:
                _answer(sock, deadline, root, request)
            except NotStored as error:
                _say(sock, deadline, Status.NOT_STORED, error.message)
            except (IntegrityError, StorageUnavailable, StorageRefused) as error:
                _say(sock, deadline, Status.REFUSED, error.message)
    except OSError as error:
        raise PeerError(f"the reader is gone or does not read: {error}") from error


def _answer(sock: socket.socket, deadline: Deadline, root: Path, request: dict[str, Any]) -> None:
    match request.get("op"):
        case "list":
            listed = [[entry.name, entry.size] for entry in LocalStorage(root).list("checkpoint-")]
            data = json.dumps(listed, separators=(",", ":")).encode()
            if len(data) > LISTING_BYTES_MAX:
                raise StorageRefused(f"a listing of {len(data)} bytes")
            _send(sock, deadline, _ANSWER.pack(Status.OK, len(data)))
            _send(sock, deadline, data)
        case "read":
            _send_file(sock, deadline, root, request)
        case other:
            raise ProtocolError(f"a request for {str(other)[:20]!r}")


def _send_file(sock: socket.socket, deadline: Deadline, root: Path, request: dict[str, Any]) -> None:
    name, offset, length = request.get("name"), request.get("offset"), request.get("length")
    if not isinstance(name, str) or not is_name(name) or step_of(name) is None:
        raise ProtocolError(f"a request for the file {str(name)[:40]!r}")
    if type(offset) is not int or type(length) not in (int, NoneType) or min(offset, length or 0) < 0:
        raise ProtocolError(f"a request for {str(length)[:20]} bytes from {str(offset)[:20]} on")
    try:
        file = os.open(root / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise NotStored(f"there is no {name}: {error.strerror}") from error
    try:
        status = os.fstat(file)
        size = status.st_size
        if not stat.S_ISREG(status.st_mode):
            raise NotStored(f"{name} is not a file")
        end = size if length is None else offset + length
        if not offset <= end <= size:
            raise IntegrityError(f"{name} has {size} bytes, fewer than the {end} it must have")
        _send(sock, deadline, _ANSWER.pack(Status.OK, end - offset))
        block = memoryview(bytearray(min(BLOCK_BYTES, end - offset)))
        # Read rather than mapped: a file that gets shorter meanwhile must not cost us the process.
        while offset < end:
            count = os.preadv(file, [block[: min(len(block), end - offset)]], offset)
            if not count:
                raise PeerError(f"{name} got shorter while it was read")
            _send(sock, deadline, block[:count])
            offset += count
    finally:
        os.close(file)


def _say(sock: socket.socket, deadline: Deadline, status: Status, sentence: str) -> None:
    data = sentence.encode()[:SENTENCE_BYTES_MAX]
    _send(sock, deadline, _ANSWER.pack(status, len(data)))
    _send(sock, deadline, data)


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
        data = self._ask({"op": "list"}, None, LISTING_BYTES_MAX)
        try:
            found = json.loads(data)
            listed = [Stored(name, size) for name, size in (found if isinstance(found, builtins.list) else [found])]
        except (ValueError, TypeError, RecursionError) as error:
            raise StorageUnavailable(f"{self.uri}: it sent no listing") from error
        if not all(isinstance(one.name, str) and is_name(one.name) and type(one.size) is int for one in listed):
            raise StorageUnavailable(f"{self.uri}: it sent no listing")
        return sorted((one for one in listed if one.name.startswith(prefix)), key=lambda one: one.name)

    def read(self, name: str, bytes_max: int) -> bytes:
        return bytes(self._ask({"op": "read", "name": name, "offset": 0, "length": None}, None, bytes_max))

    def read_into(self, name: str, memory: memoryview, offset: int = 0) -> None:
        if len(memory):
            request = {"op": "read", "name": name, "offset": offset, "length": len(memory)}
            self._ask(request, memory, FILE_BYTES_MAX)

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

    def _ask(self, request: dict[str, Any], memory: memoryview | None, bytes_max: int) -> bytes | bytearray:
        try:
            sock = self._idle.get_nowait()
        except queue.Empty:
            try:
                sock = self._dial()
            except HoldfastError as error:
                raise StorageUnavailable(f"{self.uri}: {error.message}") from error
        try:
            answer = self._exchange(sock, request, memory, bytes_max)
        except (OSError, HoldfastError) as error:
            if not isinstance(error, NotStored | IntegrityError) or self._closed.is_set():
                sock.close()  # where it stands within an answer nobody knows
                reason = error.message if isinstance(error, HoldfastError) else str(error)
                raise StorageUnavailable(f"{self.uri}: {reason}") from error
            self._idle.put(sock)
            raise
        except BaseException:
            sock.close()
            raise
        self._idle.put(sock)
        return answer

    def _exchange(
        self, sock: socket.socket, request: dict[str, Any], memory: memoryview | None, bytes_max: int
    ) -> bytes | bytearray:
        deadline = Deadline(STALL_S, TOTAL_S)
        data = encode_json(request)
        _send(sock, deadline, _LENGTH.pack(len(data)) + data)
        head = _receive(sock, deadline, _ANSWER.size)
        assert head is not None
        status, length = _ANSWER.unpack(head)
        if status in (Status.NOT_STORED, Status.REFUSED):
            sentence = bytes(_receive(sock, deadline, min(length, SENTENCE_BYTES_MAX)) or b"").decode(errors="replace")
            kind = NotStored if status == Status.NOT_STORED else IntegrityError
            raise kind(f"{self.uri}: {sentence}")
        if status != Status.OK or length > bytes_max or (memory is not None and length != len(memory)):
            raise ProtocolError(f"an answer of {length} bytes")
        if memory is None:
            return _receive(sock, deadline, length) or b""
        _receive_into(sock, deadline, memory)
        return b""


def _send(sock: socket.socket, deadline: Deadline, data: bytes | memoryview) -> None:
    view = memoryview(data)
    for start in range(0, len(view), BLOCK_BYTES):
        deadline.arm(sock)
        sock.sendall(view[start : start + BLOCK_BYTES])


def _receive(sock: socket.socket, deadline: Deadline, length: int, *, at_start: bool = False) -> bytearray | None:
    """So many bytes; None if the other side hung up before the first, where it may."""
    data = bytearray(length)
    return data if _receive_into(sock, deadline, memoryview(data), at_start=at_start) else None


def _receive_into(sock: socket.socket, deadline: Deadline, memory: memoryview, *, at_start: bool = False) -> bool:
    done = 0
    while done < len(memory):
        deadline.arm(sock)
        count = sock.recv_into(memory[done : done + BLOCK_BYTES])
        if not count:
            if at_start and not done:
                return False
            raise PeerError("the connection ended in the middle of a message")
        done += count
    return True
