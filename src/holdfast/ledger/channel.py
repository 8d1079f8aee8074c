"""A client's connection to the ledger's server: a blocking socket on which every wait has a deadline."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from holdfast.core.errors import ConfigError, LedgerRefused, LedgerUnavailable, PeerError, ProtocolError
from holdfast.ledger.wire import LEDGER, take_frame
from holdfast.net.dialling import dial_address
from holdfast.net.proving import BLOCKED
from holdfast.trust.keys import Keys

SOCKET_PATH_BYTES_MAX = 107  # of sockaddr_un, without its final zero
RETRY_S_MIN = 0.005
_RETRY_S_MAX = 0.1
_RECEIVE_BYTES = 64 * 1024


class Channel:
    """A proven connection, for one thread at a time; `interrupt` may come from any."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._input = bytearray()

    def send(self, data: bytes, deadline: float) -> None:
        """Send all of it. Raises OSError, in which case the last byte was not sent."""
        self._sock.settimeout(max(deadline - time.monotonic(), 0.001))
        self._sock.sendall(data)

    def receive(self, deadline: float) -> dict[str, Any] | None:
        """The next message; None if there was none in time. Raises OSError and ProtocolError."""
        while True:
            message = take_frame(self._input)
            if message is not None:
                return message
            self._sock.settimeout(max(deadline - time.monotonic(), 0))
            try:
                data = self._sock.recv(_RECEIVE_BYTES)
            except (*BLOCKED, TimeoutError):
                return None
            if not data:
                raise ConnectionResetError("the ledger closed the connection")
            self._input += data

    def interrupt(self) -> None:
        """Make whoever waits in `receive` find the connection closed."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # it is closed already

    def close(self) -> None:
        self._sock.close()


def connect(
    address: str, keys: Keys, deadline: float, handshake_deadline: float, *, closed: Callable[[], bool]
) -> Channel:
    """Connect and shake hands; at least one attempt, then more until `deadline` or until `closed()`.

    Raises LedgerUnavailable, or LedgerRefused at once if a stranger listens there.
    """
    retry_s, path = RETRY_S_MIN, address.removeprefix("unix:")
    while True:
        try:
            return Channel(dial_address(address, keys, LEDGER, handshake_deadline))
        except ProtocolError as error:
            raise LedgerRefused(
                f"the process that listens on {path} is not this run's ledger: {error.message}",
                hint="use the secret of the run that the agent on this host serves",
            ) from error
        except PeerError as error:
            if closed() or time.monotonic() + retry_s >= deadline:
                raise LedgerUnavailable(f"the ledger on {path} cannot be reached: {error}") from error
        time.sleep(retry_s)
        retry_s = min(2 * retry_s, _RETRY_S_MAX)


def check_socket_path(path: Path) -> None:
    length = len(os.fsencode(path))
    if length > SOCKET_PATH_BYTES_MAX:
        raise ConfigError(
            f"the ledger's socket path has {length} bytes, the system allows {SOCKET_PATH_BYTES_MAX}: {path}",
            hint="use a shorter directory for sockets, for example one under /tmp",
        )
