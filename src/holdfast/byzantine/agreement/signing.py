"""Ed25519 keys of servers and clients. The one file of this room that needs the package cryptography.

A private key is a file of its own, which only its owner can read. It is read once, when a process starts; nothing
prints it. Signatures are deterministic, so a server that starts again says the same with the same bytes.
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

from holdfast.byzantine.agreement.canonical import digest_of, pack
from holdfast.core.errors import ConfigError

VERIFIED_KEPT = 1 << 15
_HINT = "make one with `holdfast.byzantine.agreement.signing.PrivateKey.create`"

try:
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
except ModuleNotFoundError as error:
    raise ConfigError(
        f"signatures of servers and clients need the package {error.name}", hint="pip install 'holdfast[hosts]'"
    ) from error


class PrivateKey:
    def __init__(self, seed: bytes) -> None:
        self._seed = seed
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.public: bytes = self._key.public_key().public_bytes_raw()

    def __repr__(self) -> str:
        return f"PrivateKey of {self.public.hex()[:16]}"

    def __call__(self, said: bytes) -> bytes:
        return self._key.sign(said)

    @classmethod
    def create(cls) -> PrivateKey:
        return cls(os.urandom(32))

    def save(self, path: Path) -> None:
        """In a new file. Keys are never overwritten."""
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError as error:
            raise ConfigError(
                f"{path} is there already, and keys are never overwritten", hint="name a new file"
            ) from error
        with open(descriptor, "w") as file:  # noqa: PTH123 - the mode must be right from the first moment
            file.write(self._seed.hex() + "\n")
            file.flush()
            os.fsync(descriptor)

    @classmethod
    def load(cls, path: Path) -> PrivateKey:
        try:
            if path.stat().st_mode & 0o077:
                raise ConfigError(f"{path} is open to other users", hint=f"chmod 600 {path}, or make a new key")
            return cls(bytes.fromhex(path.read_text(encoding="ascii")))
        except OSError as error:
            raise ConfigError(f"cannot read the key {path}: {error.strerror}", hint=_HINT) from error
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(f"{path} is not a private key", hint=_HINT) from error


_verified: dict[bytes, bool] = {}  # by the digest of all three: what is said may be long
_lock = threading.Lock()


def verify(public_key: bytes, said: bytes, signature: bytes) -> bool:
    """Remembers what it has looked at: a claim comes again in every attestation and every record. For any thread."""
    key = digest_of(pack((public_key, digest_of(said), signature)))
    known = _verified.get(key)
    if known is None:
        known = _is_valid(public_key, said, signature)
        with _lock:
            if len(_verified) >= VERIFIED_KEPT:
                _verified.pop(next(iter(_verified)))
            _verified[key] = known
    return known


def _is_valid(public_key: bytes, said: bytes, signature: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, said)
    except (InvalidSignature, ValueError):
        return False
    return True
