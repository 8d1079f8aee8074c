"""One proven connection of the ledger's server: its buffers, its watch and its deadline.

Belongs to the server's loop, as everything there. Nothing here blocks. What a connection may hold is bounded: input
by one frame (it is not read while an answer is on its way out), output by one frame and by the iterator that makes
the next ones when there is room for them.
"""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

from holdfast.core.errors import ProtocolError
from holdfast.ledger.wire import Request, decode_request, take_frame
from holdfast.net.proving import BLOCKED

_READ_BYTES = 64 * 1024


@dataclass(frozen=True, kw_only=True)
class ConnectionPatience:
    """How long a connection may take: for the handshake, for one frame to arrive, for its output to be taken."""

    handshake_s: float = 2.0
    frame_s: float = 10.0
    send_s: float = 30.0


@dataclass
class WatchCursor:
    prefix: str
    revision: int  # every change up to here is on its way to the watcher
    announced: int  # the revision that the watcher was last told


@dataclass(eq=False)
class LedgerConnection:
    sock: socket.socket
    patience: ConnectionPatience
    watch: WatchCursor | None = None
    frames: Iterator[bytes] | None = None  # the rest of the answer
    closing: bool = False  # once the output is out
    deadline: float = math.inf  # if it has not moved on by then, it is closed
    _waits_for: str = ""
    _moved: bool = False  # a whole frame came in or some output went out since `rearm`
    _input: bytearray = field(default_factory=bytearray)
    _output: bytearray = field(default_factory=bytearray)

    @property
    def sending(self) -> bool:
        return bool(self._output) or self.frames is not None

    def receive(self) -> bool:
        """Read what is there. False when the other side is gone. Raises OSError and ProtocolError."""
        try:
            data = self.sock.recv(_READ_BYTES)
        except BLOCKED:
            return True
        if data and self.watch is not None:
            raise ProtocolError("a watcher does not speak")
        self._input += data
        return bool(data)

    def take_request(self) -> Request | None:
        """The next request, or None if there is none. Raises ProtocolError."""
        message = take_frame(self._input)
        if message is None:
            return None
        self._moved = True
        return decode_request(message)

    def send(self, data: bytes) -> None:
        self._output += data

    def flush(self) -> bool:
        """Send until all is out (True) or the socket takes no more (False). Raises OSError."""
        while self.sending:
            if not self._output:
                assert self.frames is not None
                following = next(self.frames, None)
                if following is None:
                    self.frames = None
                    break
                self._output += following
            try:
                sent = self.sock.send(self._output)
            except BLOCKED:
                return False
            self._moved = True
            del self._output[:sent]
        return True

    def rearm(self, now: float) -> None:
        """Set the deadline by what the connection waits for now. A byte now and then does not put it off."""
        if self.sending:
            waits_for, patience_s = "send", self.patience.send_s
        elif self._input:
            waits_for, patience_s = "frame", self.patience.frame_s
        else:
            waits_for, patience_s = "request", math.inf
        if self._moved or waits_for != self._waits_for:
            self._waits_for = waits_for
            self.deadline = now + patience_s
        self._moved = False
