"""The one protocol for "give me these bytes": a reader asks for ranges of what has a name, a server sends them.

    request   a frame: {"name": text, "start": number, "stop": number, or null for the end}
    reply     status (1 byte), length (8 bytes), and so many bytes
        OK        the bytes; then, beyond `length`, their xxh3_128 (16 bytes)
        MISSING   a sentence: there is nothing under this name
        REFUSED   a sentence: there is, but not so much of it, or it cannot be given

One request at a time; the reader hangs up when it has enough. What the names are is agreed between a server and its
readers: a snapshot (state/transfer.py), the mean of a step (engine's catching.py), a host's memory (memory_desk.py).

The connections have proved before that they belong to the run, and each is used by one thread at a time. Nothing that
comes from the other side is trusted: requests are checked field by field, lengths before memory is taken for them, and
every wait has an end.
"""

from __future__ import annotations

import enum
import socket
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import NoneType

import xxhash

from holdfast.core.errors import IntegrityError, NotStored, PeerError, ProtocolError, StorageError
from holdfast.core.words import decode_json, encode_json
from holdfast.net.framing import frame
from holdfast.net.streams import Deadline, receive, receive_frame, receive_into, send

STALL_S, TOTAL_S = 10.0, 600.0
REQUEST_BYTES_MAX = 4096
NAME_CHARACTERS_MAX = 1000
POSITION_MAX = 1 << 62
SENTENCE_BYTES_MAX = 1000
CHECK_BYTES = 16
BLOCK_BYTES = 1 << 20
_REPLY = struct.Struct("!BQ")
REPLY_BYTES = _REPLY.size


class Status(enum.IntEnum):
    OK = 0
    MISSING = 1
    REFUSED = 2


@dataclass(frozen=True)
class Request:
    name: str
    start: int = 0
    stop: int | None = None

    def encode(self) -> bytes:
        return frame(encode_json({"name": self.name, "start": self.start, "stop": self.stop}))

    @classmethod
    def decode(cls, body: bytes) -> Request:
        """ProtocolError for what no reader would ask."""
        fields = decode_json(body)
        name, start, stop = fields.get("name"), fields.get("start"), fields.get("stop", "")
        if not isinstance(name, str) or len(name) > NAME_CHARACTERS_MAX:
            raise ProtocolError(f"a request for {str(name)[:40]!r}")
        if type(start) is not int or type(stop) not in (int, NoneType):
            raise ProtocolError(f"a request for the bytes {str(start)[:20]} to {str(stop)[:20]}")
        if not 0 <= start <= (start if stop is None else stop) <= POSITION_MAX:
            raise ProtocolError(f"a request for the bytes {str(start)[:20]} to {str(stop)[:20]}")
        return cls(name, start, stop)


def encode_reply(status: Status, length: int) -> bytes:
    return _REPLY.pack(status, length)


def decode_reply(data: bytes) -> tuple[Status, int]:
    try:
        status, length = _REPLY.unpack(data)
        return Status(status), length
    except (struct.error, ValueError) as error:
        raise ProtocolError(f"not a reply to a request for bytes: {data[:80]!r}") from error


class Offer:
    """What there is under a name: this one is a piece of memory. Others may make their bytes as they are asked for."""

    def __init__(self, memory: bytes | memoryview) -> None:
        self._memory = memoryview(memory)
        self.nbytes = len(self._memory)

    def pieces(self, start: int, stop: int) -> Iterable[list[memoryview]]:
        """These bytes, as lists of views that are sent at once."""
        return blocks(self._memory[start:stop])

    def digest(self, start: int, stop: int) -> bytes | None:
        """The xxh3_128 that these bytes must have. None: of what is sent."""
        return None

    def close(self) -> None:
        """It was sent, or was not."""


def blocks(memory: memoryview) -> Iterator[list[memoryview]]:
    for start in range(0, len(memory), BLOCK_BYTES):
        yield [memory[start : start + BLOCK_BYTES]]


def serve_bytes(
    sock: socket.socket, find: Callable[[str], Offer], *, stall_s: float = STALL_S, total_s: float = TOTAL_S
) -> int:
    """Answer one reader until it hangs up; how many bytes it was sent. Waits, so it has a thread of its own.

    `find` raises NotStored, another StorageError for what cannot be given, ProtocolError for what no reader would ask.
    PeerError when the reader stalls, is gone or breaks the protocol.
    """
    deadline, sent = Deadline(stall_s, total_s), 0
    try:
        while (body := receive_frame(sock, deadline, REQUEST_BYTES_MAX)) is not None:
            request = Request.decode(body)
            try:
                offer = find(request.name)
            except StorageError as error:
                _say(sock, deadline, Status.MISSING if isinstance(error, NotStored) else Status.REFUSED, error.message)
                continue
            try:
                sent += _send_range(sock, deadline, offer, request)
            finally:
                offer.close()
    except OSError as error:
        raise PeerError(f"the reader is gone or does not read: {error}") from error
    return sent


def _send_range(sock: socket.socket, deadline: Deadline, offer: Offer, request: Request) -> int:
    start, stop = request.start, offer.nbytes if request.stop is None else request.stop
    if not start <= stop <= offer.nbytes:
        sentence = f"{request.name} has {offer.nbytes} bytes, fewer than the {max(start, stop)} it must have"
        _say(sock, deadline, Status.REFUSED, sentence)
        return 0
    head = [memoryview(encode_reply(Status.OK, stop - start))]
    known = offer.digest(start, stop)
    hasher = xxhash.xxh3_128()
    for piece in offer.pieces(start, stop):
        if known is None:
            for view in piece:
                hasher.update(view)
        send(sock, deadline, head + piece)
        head = []
    send(sock, deadline, [*head, memoryview(known or hasher.digest())])
    return stop - start


def _say(sock: socket.socket, deadline: Deadline, status: Status, sentence: str) -> None:
    data = sentence.encode()[:SENTENCE_BYTES_MAX]
    send(sock, deadline, [memoryview(encode_reply(status, len(data))), memoryview(data)])


class ByteReader:
    """The asking side. After NotStored and IntegrityError one can ask on; after OSError and PeerError nobody knows
    where the connection stands within an answer.
    """

    def __init__(self, sock: socket.socket, deadline: Deadline) -> None:
        self._sock = sock
        self._deadline = deadline

    def read(self, name: str, bytes_max: int) -> bytes:
        """All of it, if it is not more than that."""
        length = self._ask(Request(name))
        if length > bytes_max:
            raise ProtocolError(f"an answer of {length} bytes, where at most {bytes_max} are read")
        data = receive(self._sock, self._deadline, length)
        self._check(name, 0, length, xxhash.xxh3_128_digest(data))
        return data

    def read_into(self, name: str, start: int, stop: int, pieces: Iterable[list[memoryview]]) -> bytes:
        """These bytes, into the memory of `pieces`; their digest."""
        length = self._ask(Request(name, start, stop))
        if length != stop - start:
            raise ProtocolError(f"an answer of {length} bytes, where {stop - start} were asked for")
        hasher = xxhash.xxh3_128()
        for piece in pieces:
            receive_into(self._sock, self._deadline, piece)
            for view in piece:
                hasher.update(view)
        self._check(name, start, stop, hasher.digest())
        return hasher.digest()

    def _ask(self, request: Request) -> int:
        """Sends the request; the length of what follows the reply."""
        send(self._sock, self._deadline, [memoryview(request.encode())])
        status, length = decode_reply(receive(self._sock, self._deadline, REPLY_BYTES))
        if status is Status.OK:
            return length
        if length > SENTENCE_BYTES_MAX:
            raise ProtocolError(f"a refusal of {length} bytes")
        sentence = receive(self._sock, self._deadline, length).decode(errors="replace")
        raise (NotStored if status is Status.MISSING else IntegrityError)(sentence)

    def _check(self, name: str, start: int, stop: int, digest: bytes) -> None:
        if receive(self._sock, self._deadline, CHECK_BYTES) != digest:
            raise IntegrityError(
                f"the bytes {start} to {stop} of the {name} are not those that were promised",
                hint="they were damaged on their way, or changed meanwhile: optimizer.step came too early",
            )
