"""Keys, parcels and masks of a masked round: X25519, HKDF-SHA256, ChaCha20-Poly1305 and ChaCha20, from `cryptography`.

All keys are of one round, and so is every nonce: a pair's two parcels are sealed by one key with different nonces, and
no key is used again. Seeds have 16 bytes, which is the strength of X25519 and what can be shared (sharing.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from holdfast.byzantine.agreement.canonical import Plain, digest_of, pack
from holdfast.byzantine.privacy.dealing import NONCE_BYTES
from holdfast.core.errors import ConfigError, ProtocolError

try:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF
except ModuleNotFoundError as error:
    raise ConfigError(f"masked sums need the package {error.name}", hint="pip install 'holdfast[privacy]'") from error

SEED_BYTES = 16
KEY_BYTES = 32
TAG_BYTES = 16
_PROBE = X25519PrivateKey.from_private_bytes(bytes(range(KEY_BYTES)))

Expand = Callable[[bytes, int], bytes]  # a key and a length: so many bytes that look like chance


@dataclass(frozen=True)
class Secrets:
    """What one client draws for one round. Nothing prints it."""

    nonce: bytes = field(repr=False)
    cipher_seed: bytes = field(repr=False)
    mask_seed: bytes = field(repr=False)
    self_seed: bytes = field(repr=False)

    @classmethod
    def draw(cls) -> Secrets:
        """From the kernel's generator."""
        return cls(os.urandom(NONCE_BYTES), *(os.urandom(SEED_BYTES) for _ in range(3)))


def derived(secret: bytes, *about: Plain) -> bytes:
    return HKDF(hashes.SHA256(), KEY_BYTES, salt=None, info=pack(about)).derive(secret)


class KeyPair:
    def __init__(self, seed: bytes) -> None:
        self._key = X25519PrivateKey.from_private_bytes(derived(seed, "holdfast key pair"))
        self.public: bytes = self._key.public_key().public_bytes_raw()

    def agree(self, public: bytes, *about: Plain) -> bytes:
        """A key that only the two of them know. ProtocolError for a public key that is none."""
        try:
            shared = self._key.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError as error:
            raise ProtocolError("a public key that is none") from error
        return derived(shared, *about)


def is_public_key(content: bytes) -> bool:
    """Neither of another length nor one of the few with which every agreement is zero."""
    try:
        _PROBE.exchange(X25519PublicKey.from_public_bytes(content))
    except ValueError:
        return False
    return True


def seal(key: bytes, sender: str, receiver: str, content: bytes) -> bytes:
    return ChaCha20Poly1305(key).encrypt(_nonce(sender, receiver), content, pack((sender, receiver)))


def opened(key: bytes, sender: str, receiver: str, sealed: bytes) -> bytes | None:
    """None: it was not sealed by the sender for the receiver."""
    try:
        return ChaCha20Poly1305(key).decrypt(_nonce(sender, receiver), sealed, pack((sender, receiver)))
    except InvalidTag:
        return None


def _nonce(sender: str, receiver: str) -> bytes:
    return bytes([sender < receiver]) + bytes(11)


def expand(key: bytes, length: int) -> bytes:
    """ChaCha20's stream."""
    return Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(length))


def commitment_to(seed: bytes, about: bytes, client: str) -> bytes:
    """To the seed of a self mask: it tells nothing of a seed drawn by chance, and fits no other."""
    return digest_of(pack(("holdfast self mask", seed, about, client)))
