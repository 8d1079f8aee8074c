"""Proof, at connect, that both ends of a connection belong to the run: to the ledger, between workers, between agents.

    client -> server   MAGIC, client nonce
    server -> client   server nonce, HMAC-SHA256(secret, "server", kind, both nonces)
    client -> server   HMAC-SHA256(secret, "client", kind, both nonces)
    server -> client   WELCOME

The secret itself never travels, fresh nonces make a recording worthless, and the role and the kind of server in each
proof keep it from being played back to its sender or to another kind of server. When a handshake has ended well,
both sides know it. It neither encrypts nor signs what follows on the connection: between hosts it runs inside TLS
(tls.py).

Nothing here does IO (net/proving.py does): send `opening`, then feed exactly `need` bytes at a time and send what comes
back, until `need` is 0.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Callable

from holdfast.core.errors import ConfigError, ProtocolError

MAGIC = b"hldfast1"
NONCE_BYTES = 32
MAC_BYTES = 32
WELCOME = b"\x01"
SECRET_BYTES_MIN = 16


class ClientHandshake:
    """The connecting side."""

    def __init__(self, secret: bytes, kind: bytes, *, draw: Callable[[int], bytes] = os.urandom) -> None:
        self._prove = _Prover(secret, kind)
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

    def __init__(self, secret: bytes, kind: bytes, *, draw: Callable[[int], bytes] = os.urandom) -> None:
        self._prove = _Prover(secret, kind)
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
    """HMACs that say: I know the secret, I am this role, this is for such a server, and it is now."""

    def __init__(self, secret: bytes, kind: bytes) -> None:
        if len(secret) < SECRET_BYTES_MIN:
            raise ConfigError(
                f"the run's secret has {len(secret)} bytes",
                hint=f"use at least {SECRET_BYTES_MIN} random bytes; `holdfast run` makes 32",
            )
        assert b"\0" not in kind
        self._secret = secret
        self._kind = kind

    def __call__(self, role: bytes, nonces: bytes) -> bytes:
        said = b"\0".join((b"holdfast", role, self._kind, nonces))
        return hmac.new(self._secret, said, hashlib.sha256).digest()

    def check(self, role: bytes, nonces: bytes, proof: bytes) -> None:
        if not hmac.compare_digest(self(role, nonces), proof):
            raise ProtocolError(f"the {role.decode()} does not know this run's secret")
