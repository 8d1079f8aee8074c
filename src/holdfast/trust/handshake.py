"""Proof, at connect, that both ends of a connection belong to the run. Used by the ledger and between workers.

    client -> server   MAGIC, client nonce
    server -> client   server nonce, HMAC-SHA256(secret, "server", purpose, both nonces)
    client -> server   HMAC-SHA256(secret, "client", purpose, both nonces)
    server -> client   WELCOME

The secret itself never travels, fresh nonces make a recording worthless, and the role and the purpose in each
proof keep it from being played back to its sender or to another kind of server. When a handshake has ended well,
both sides know it. It neither encrypts nor signs what follows on the connection: between hosts it runs inside TLS
(tls.py).

`ClientHandshake` and `ServerHandshake` do no IO: send `opening`, then feed exactly `need` bytes at a time and send
what comes back, until `need` is 0. `client_handshake` and `server_handshake` drive them on a blocking socket.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import time
from collections.abc import Callable

from holdfast.core.errors import ConfigError, PeerError, ProtocolError

MAGIC = b"hldfast1"
NONCE_BYTES = 32
MAC_BYTES = 32
WELCOME = b"\x01"
SECRET_BYTES_MIN = 16
HANDSHAKE_S = 2.0


class ClientHandshake:
    """The connecting side."""

    def __init__(self, secret: bytes, purpose: bytes, *, draw: Callable[[int], bytes] = os.urandom) -> None:
        self._prove = _Prover(secret, purpose)
        self._nonce = draw(NONCE_BYTES)
        self.opening = MAGIC + self._nonce
        self.need = NONCE_BYTES + MAC_BYTES

    def feed(self, data: bytes) -> bytes:
        assert len(data) == self.need > 0
        if self.need == len(WELCOME):
            if data != WELCOME:
                raise ProtocolError("the other side ended the handshake with something else than a welcome")
            self.need = 0
            return b""
        nonces = self._nonce + data[:NONCE_BYTES]
        self._prove.check(b"server", nonces, data[NONCE_BYTES:])
        self.need = len(WELCOME)
        return self._prove(b"client", nonces)


class ServerHandshake:
    """The accepting side."""

    opening = b""

    def __init__(self, secret: bytes, purpose: bytes, *, draw: Callable[[int], bytes] = os.urandom) -> None:
        self._prove = _Prover(secret, purpose)
        self._nonce = draw(NONCE_BYTES)
        self._nonces = b""
        self.need = len(MAGIC) + NONCE_BYTES

    def feed(self, data: bytes) -> bytes:
        assert len(data) == self.need > 0
        if self._nonces:
            self._prove.check(b"client", self._nonces, data)
            self.need = 0
            return WELCOME
        if data[: len(MAGIC)] != MAGIC:
            raise ProtocolError(f"a connection began with {data[: len(MAGIC)]!r}, not with {MAGIC!r}")
        self._nonces = data[len(MAGIC) :] + self._nonce
        self.need = MAC_BYTES
        return self._nonce + self._prove(b"server", self._nonces)


class _Prover:
    """HMACs that say: I know the secret, I am this role, this is for this purpose, and it is now."""

    def __init__(self, secret: bytes, purpose: bytes) -> None:
        if len(secret) < SECRET_BYTES_MIN:
            raise ConfigError(
                f"the run's secret has {len(secret)} bytes",
                hint=f"use at least {SECRET_BYTES_MIN} random bytes; `holdfast run` makes 32",
            )
        assert b"\0" not in purpose
        self._secret = secret
        self._purpose = purpose

    def __call__(self, role: bytes, nonces: bytes) -> bytes:
        said = b"\0".join((b"holdfast", role, self._purpose, nonces))
        return hmac.new(self._secret, said, hashlib.sha256).digest()

    def check(self, role: bytes, nonces: bytes, proof: bytes) -> None:
        if not hmac.compare_digest(self(role, nonces), proof):
            raise ProtocolError(f"the {role.decode()} does not know this run's secret")


def client_handshake(sock: socket.socket, secret: bytes, deadline: float, *, purpose: bytes) -> None:
    """Prove ourselves to the server that `sock` is connected to, and have it prove itself.

    `deadline` is a time.monotonic() time. Raises ProtocolError for a stranger, PeerError if the other side is
    gone or late. The caller closes the socket after an error.
    """
    _drive(sock, ClientHandshake(secret, purpose), deadline)


def server_handshake(sock: socket.socket, secret: bytes, deadline: float, *, purpose: bytes) -> None:
    """The same for a socket that was accepted."""
    _drive(sock, ServerHandshake(secret, purpose), deadline)


def _drive(sock: socket.socket, handshake: ClientHandshake | ServerHandshake, deadline: float) -> None:
    timeout_before = sock.gettimeout()
    try:
        _send(sock, handshake.opening, deadline)
        while handshake.need:
            _send(sock, handshake.feed(_receive(sock, handshake.need, deadline)), deadline)
        sock.settimeout(timeout_before)
    except TimeoutError as error:
        raise PeerError("the other side did not finish the handshake in time") from error
    except OSError as error:
        raise PeerError(f"the connection broke during the handshake: {error}") from error


def _send(sock: socket.socket, data: bytes, deadline: float) -> None:
    if data:
        sock.settimeout(_left_s(deadline))
        sock.sendall(data)


def _receive(sock: socket.socket, count: int, deadline: float) -> bytes:
    """Exactly `count` bytes, and none of those after them: they belong to whoever comes next."""
    data = b""
    while len(data) < count:
        sock.settimeout(_left_s(deadline))
        more = sock.recv(count - len(data))
        if not more:
            raise PeerError("the other side closed the connection during the handshake")
        data += more
    return data


def _left_s(deadline: float) -> float:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s
