"""Who is in which bucket, from a seed that no client chooses, and the server does not choose alone.

The server draws a secret and announces its digest before it has heard of anybody. Every client answers with a nonce.
The seed is the digest of the secret and all nonces. A client cannot aim at a bucket, since it does not know the secret
when it sends its nonce; the server cannot, since its secret is fixed before it knows the nonces. Every client is shown
both and deals again for itself. What is left: a server may pretend not to have heard some clients and so choose among
deals, and one that acts together with a client can have that client's nonce come last and choose it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from holdfast.byzantine.agreement.canonical import digest_of, pack

NONCE_BYTES = 16
SECRET_BYTES = 32


def commitment_to(secret: bytes) -> bytes:
    return digest_of(pack(("holdfast deal", secret)))


def seed_of(secret: bytes, round: int, nonces: Mapping[str, bytes]) -> bytes:
    return digest_of(pack(("holdfast buckets", secret, round, tuple(sorted(nonces.items())))))


def dealt(seed: bytes, clients: Iterable[str], buckets: int) -> tuple[tuple[str, ...], ...]:
    """Buckets of sizes that differ by one at most, each in the order of names."""
    order = sorted(clients, key=lambda name: digest_of(pack((seed, name))))
    return tuple(tuple(sorted(order[number::buckets])) for number in range(buckets))
