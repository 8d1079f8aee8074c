"""The records that ranks write to each other, as bytes: a head of fixed size, a request's text, a few bytes of data.

A rank's records have one order, in which every other rank reads them. What no rank writes is a ProtocolError.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from holdfast.core.errors import ProtocolError
from holdfast.horovod.exchange.matching import Announced
from holdfast.horovod.exchange.words import Request

# total bytes, what, bytes of text, bytes of data, serial, count or phase, offset, length
HEAD = struct.Struct("<IBxxxIIQQQQ")
TEXT_BYTES_MAX = 512 * 1024  # some 20,000 tensors; a ring in shared memory holds eight of these (arena.py)
KNOWN_MAX = 8192  # requests whose text is remembered: a training says the same ones again and again


class What(IntEnum):
    SKIP = 0  # the ring begins anew
    ANNOUNCE = 1  # a request; its data is here, in shared memory, or comes when all have announced it
    PART = 2  # my slice of the result is where my data was
    DONE = 3  # I need nothing more of this collective
    WAIT = 4  # my script waits for this collective
    BYE = 5  # I leave in order: nothing comes after this
    DATA = 6  # a piece of data for one peer (network)
    STALL = 7  # ranks wait for each other: why, and the collectives that all give up


@dataclass(frozen=True, slots=True)
class Record:
    what: What
    serial: int = 0  # of the sender's request that it is about
    count: int = 0
    offset: int = 0
    length: int = 0
    text: bytes = b""
    data: bytes = b""

    def encode(self) -> bytes:
        size = HEAD.size + len(self.text) + len(self.data)
        head = HEAD.pack(
            size, self.what, len(self.text), len(self.data), self.serial, self.count, self.offset, self.length
        )
        return b"".join((head, self.text, self.data))

    @classmethod
    def decode(cls, memory: memoryview | bytes | bytearray, at: int = 0) -> Record:
        try:
            size, what, texts, datas, serial, count, offset, length = HEAD.unpack_from(memory, at)
            if size != HEAD.size + texts + datas or len(memory) - at < size:
                raise ProtocolError("a record of another size than it says")
            start = at + HEAD.size
            text = bytes(memory[start : start + texts])
            return cls(
                What(what), serial, count, offset, length, text, bytes(memory[start + texts : start + texts + datas])
            )
        except (struct.error, ValueError) as error:
            raise ProtocolError("a peer sent something else than a record") from error


class KnownRequests:
    """Requests by their text, each read once."""

    def __init__(self) -> None:
        self._known: dict[bytes, Request] = {}

    def remember(self, text: bytes, request: Request) -> None:
        """What this rank says itself: where others say the same it is the same object, and easily compared."""
        if text not in self._known:
            self._known[text] = request

    def announced(self, record: Record) -> Announced:
        request = self._known.get(record.text)
        if request is None:
            if len(self._known) >= KNOWN_MAX:
                self._known.clear()
            request = self._known[record.text] = Request.decode(record.text)
        inline = record.data if record.length == 0 else None
        return Announced(request, record.serial, record.count, inline, record.offset, record.length)


def decode_record(body: bytearray) -> tuple[Record, Any]:
    """What a group's connections carry: records, and the doorbell of shared memory."""
    return (Record.decode(body), None) if len(body) > 1 else (Record(What.SKIP), None)
