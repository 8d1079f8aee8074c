"""Secrets in shares of which `threshold` open them and fewer tell nothing: Shamir's scheme, from `pycryptodome`.

A share does not prove itself. Who opens a secret can tell a right one, and tries other shares where one was wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import combinations, islice

from holdfast.core.errors import ConfigError

try:
    from Crypto.Protocol.SecretSharing import Shamir
except ModuleNotFoundError as error:
    raise ConfigError("secret shares need the package pycryptodome", hint="pip install 'holdfast[privacy]'") from error

SHARE_BYTES = 16
TRIES_MAX = 500


def split(secret: bytes, threshold: int, members: int) -> list[bytes]:
    """For member 0, 1, … The coefficients are drawn from the kernel's generator."""
    return [share for _, share in Shamir.split(threshold, members, secret, False)]


def recovered(shares: Mapping[int, bytes], threshold: int, is_right: Callable[[bytes], bool]) -> bytes | None:
    """From shares by their member's number; None if no `threshold` of them, of those that are tried, fit together."""
    for some in islice(combinations(sorted(shares.items()), threshold), TRIES_MAX):
        secret = bytes(Shamir.combine([(number + 1, share) for number, share in some], False))
        if is_right(secret):
            return secret
    return None
