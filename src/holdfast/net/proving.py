"""Proof that a connection belongs to the run: TLS where it comes over TCP and the run has certificates, then the
handshake in both directions (trust/handshake.py), for one kind of server.

`Proving` is the accepting side. It never waits, so that one thread can attend to all who knock. `prove` is the dialling
side. It waits, and has a deadline.
"""

from __future__ import annotations

import selectors
import socket
import ssl
import time

from holdfast.core.errors import PeerError, ProtocolError
from holdfast.net.streams import Deadline, receive, send
from holdfast.trust.handshake import ClientHandshake, ServerHandshake
from holdfast.trust.keys import Keys

STAGES = 3  # nothing, TLS, the handshake
BLOCKED = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class Proving:
    """An accepted connection until it has proved itself. `stage` counts what it has shown, below STAGES."""

    def __init__(self, sock: socket.socket, keys: Keys, kind: bytes, deadline: float) -> None:
        sock.setblocking(False)
        context = None if sock.family == socket.AF_UNIX else keys.server_context()
        if context is not None:
            sock = context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        self.sock = sock
        self.deadline = deadline
        self.stage = 0
        self.waits_for = selectors.EVENT_READ
        self._handshake = ServerHandshake(keys.secret, kind)
        self._input = bytearray()

    def advance(self) -> bool:
        """Go on as far as possible. True once it is done; PeerError or OSError for whoever is not welcome."""
        self.waits_for = selectors.EVENT_READ
        try:
            if self.stage == 0:
                if isinstance(self.sock, ssl.SSLSocket):
                    self.sock.do_handshake()
                self.stage = 1
            while self._handshake.need:
                self._shake_hands()
            self.stage = 2
            self._finish()
        except ssl.SSLWantWriteError:
            self.waits_for = selectors.EVENT_WRITE
            return False
        except BLOCKED:
            return False
        return True

    def _finish(self) -> None:
        """What a connection must say after its proof. Raises one of BLOCKED when there is not enough yet."""

    def _shake_hands(self) -> None:
        need = self._handshake.need
        while len(self._input) < need:
            more = self.sock.recv(need - len(self._input))
            if not more:
                raise PeerError("the other side closed the connection during the handshake")
            self._input += more
        answer = self._handshake.feed(bytes(self._input))
        self._input.clear()
        if self.sock.send(answer) != len(answer):
            raise PeerError("the other side does not read")

    def close(self) -> None:
        self.sock.close()


def prove(sock: socket.socket, keys: Keys, kind: bytes, deadline: float) -> socket.socket:
    """Prove ourselves to the server behind `sock`, and have it prove itself; the socket to use from now on.

    `deadline` is a time.monotonic() time. ProtocolError for a stranger, OSError or PeerError if the other side is gone
    or late; the connection is closed then.
    """
    context = None if sock.family == socket.AF_UNIX else keys.client_context()
    try:
        if context is not None:
            sock.settimeout(max(deadline - time.monotonic(), 0.001))
            sock = context.wrap_socket(sock)  # which closes the connection itself if it fails
        client_handshake(sock, keys.secret, deadline, kind=kind)
    except ssl.SSLCertVerificationError as error:
        sock.close()
        raise ProtocolError(f"the other side's certificate is not of this run: {error.verify_message}") from error
    except BaseException:
        sock.close()
        raise
    return sock


def client_handshake(sock: socket.socket, secret: bytes, deadline: float, *, kind: bytes) -> None:
    """The handshake alone. The caller closes the socket after an error."""
    handshake, timeout_before = ClientHandshake(secret, kind), sock.gettimeout()
    left_s = deadline - time.monotonic()
    end = Deadline(left_s, left_s)
    try:
        send(sock, end, [memoryview(handshake.opening)])
        while handshake.need:  # exactly so much: what comes behind it belongs to whoever comes next
            answer = handshake.feed(receive(sock, end, handshake.need))
            send(sock, end, [memoryview(answer)] if answer else [])
        sock.settimeout(timeout_before)
    except TimeoutError as error:
        raise PeerError("the other side did not finish the handshake in time") from error
    except OSError as error:
        raise PeerError(f"the connection broke during the handshake: {error}") from error
