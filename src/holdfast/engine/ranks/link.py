"""What ranks of a group tell each other: messages in order, some with a file descriptor.

The other side is a process that this one has forked, or that has forked this one: nobody else can open the socket.
"""

from __future__ import annotations

import pickle
import socket
import struct
from typing import Any

from holdfast.core.errors import Evicted

_HEADER = struct.Struct("<IB")  # bytes of the message, and whether a descriptor comes with it
Message = tuple[Any, ...]  # its kind, and what that has


class Link:
    """To one other rank. Belongs to the thread of the user's loop."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def send(self, *message: Any, fd: int = -1) -> None:
        body = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        header = _HEADER.pack(len(body), fd >= 0)
        try:
            if fd >= 0:
                socket.send_fds(self._sock, [header], [fd])
                header = b""
            self._sock.sendall(header + body)
        except OSError as error:
            raise _gone() from error

    def receive(self, timeout_s: float | None = None) -> Message | None:
        """The next message, a descriptor that came with it at its end; None: there is none in that time."""
        self._sock.settimeout(timeout_s)
        try:
            first, fds, _, _ = socket.recv_fds(self._sock, _HEADER.size, 1)
            if not first:
                raise _gone()
            self._sock.settimeout(None)  # what has begun comes whole
            size, has_fd = _HEADER.unpack(first + self._read(_HEADER.size - len(first)))
            message: Message = pickle.loads(self._read(size))
        except (TimeoutError, BlockingIOError):
            return None
        except OSError as error:
            raise _gone() from error
        finally:
            self._sock.settimeout(None)
        return (*message, fds[0]) if has_fd else message

    def expect(self, kind: str, within_s: float) -> Message:
        """What a rank says that is at the same place: nothing else can come. Evicted if it does not come in time: one
        that stands still must not hold up the other groups, and ends with this one."""
        message = self.receive(within_s)
        if message is None:
            raise Evicted(f"another rank of its group has not answered for {within_s:g} s")
        assert message[0] == kind, f"expected {kind}, and was told {message}"
        return message[1:]

    def _read(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            more = self._sock.recv(size - len(found))
            if not more:
                raise _gone()
            found += more
        return bytes(found)

    def close(self) -> None:
        self._sock.close()


class Links:
    """From rank 0 to all others."""

    def __init__(self, socks: list[socket.socket]) -> None:
        self._links = [Link(sock) for sock in socks]

    def tell(self, *message: Any, fd: int = -1) -> None:
        for link in self._links:
            link.send(*message, fd=fd)

    def hear(self, kind: str, within_s: float) -> list[Message]:
        """From each of them, in the order of ranks."""
        return [link.expect(kind, within_s) for link in self._links]


def _gone() -> Evicted:
    return Evicted("another rank of its group is gone")
