"""What an answer that is not a result means: try elsewhere, prove yourself again, or take no for an answer.

etcd says most things twice, as a gRPC code and in words; the words are needed where one code means several things.
"""

from __future__ import annotations

import grpc

from holdfast.core.errors import HoldfastError, LeaseGone, LedgerRefused
from holdfast.ledger.etcd.address import CA, USER

_ELSEWHERE = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.INTERNAL,
    grpc.StatusCode.UNKNOWN,
    grpc.StatusCode.UNIMPLEMENTED,  # whoever listens there is not an etcd, or not one that is up yet
}
_FULL = "database space exceeded"
_NOT_HERE = ("not leader", "not supported for learner")
_OLD_TOKEN = ("invalid auth token", "revision of auth store is old")
# What grpc wraps in layers and addresses, as a person would say it. `True`: the two will never trust each other.
_SAYINGS = (
    ("CERTIFICATE_VERIFY_FAILED", "its certificate is not trusted", True),
    ("certificate signature failure", "its certificate is not trusted", True),
    ("Hostname Verification", "its certificate does not name this host", True),
    ("WRONG_VERSION_NUMBER", "it does not speak TLS", True),
    ("SSL_ERROR_SSL", "the TLS handshake failed", True),
    ("Handshake read failed", "it ended the TLS handshake; does it speak TLS?", False),
    ("Unwrap failed", "it broke off after the TLS handshake; does it trust our certificate?", False),
    ("Socket closed", "it closed the connection; does it want TLS?", False),
    ("Connection refused", "connection refused", False),
    ("Connection reset", "connection reset", False),
    ("No route to host", "no route to host", False),
    ("Network is unreachable", "network is unreachable", False),
    ("DNS", "its name is not known", False),
    ("errors resolving", "its name is not known", False),
    ("imed out", "no connection in time", False),
)


class Elsewhere(Exception):
    """This endpoint does not serve now: what was asked may or may not have happened. `tls`: it never will like this."""

    def __init__(self, reason: str, *, tls: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.tls = tls


class TokenOld(Exception):
    """The token is not, or no longer, known there: authenticate again."""


class NotFound(Exception):
    """There is no such lease."""


class LeaseExists(Exception):
    """A lease of that number is there already."""


class Compacted(Exception):
    """The revision asked for is no longer kept."""


def failure_of(error: grpc.RpcError) -> Exception:
    """The exception to raise in the place of one of grpc's."""
    code, words = error.code(), error.details() or ""
    plain = words.removeprefix("etcdserver: ")
    if code is grpc.StatusCode.UNAUTHENTICATED or any(old in words for old in _OLD_TOKEN):
        return TokenOld(plain)
    if code is grpc.StatusCode.NOT_FOUND and "lease" in words:
        return NotFound(plain)
    if code is grpc.StatusCode.FAILED_PRECONDITION and "lease already exists" in words:
        return LeaseExists(plain)
    if code is grpc.StatusCode.OUT_OF_RANGE and "compacted" in words:
        return Compacted(plain)
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and _FULL not in words:
        return Elsewhere(plain)  # too many requests at the moment
    if code in _ELSEWHERE or plain.endswith(_NOT_HERE):
        return _elsewhere(code, words)
    return refusal(plain)


def refusal(words: str) -> HoldfastError:
    """etcd said no, and will say so again."""
    if _FULL in words:
        return LedgerRefused("etcd's database is full", hint="compact and defragment it, or raise its quota")
    if "user name is empty" in words:
        return LedgerRefused("etcd wants a user and a password", hint=f"set {USER} and a password")
    if "invalid user ID or password" in words:
        return LedgerRefused("etcd does not know this user and password", hint=f"check {USER} and the password")
    if "permission denied" in words:
        return LedgerRefused(
            "etcd does not let this user at the run's keys", hint="it needs to read and write all under /holdfast/"
        )
    return LedgerRefused(f"etcd refused: {words or 'without a reason'}")


def lease_gone(lease: int) -> LeaseGone:
    return LeaseGone(f"lease {lease} ran out or was revoked")


def handshake_refused(reason: str) -> LedgerRefused:
    return LedgerRefused(
        f"no connection to the ledger that both sides trust: {reason}",
        hint=f"check {CA}; etcds:// needs an etcd with TLS whose certificate names the host in the URL",
    )


def _elsewhere(code: grpc.StatusCode, words: str) -> Elsewhere:
    if code in (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):  # by us, since others had no answer
        return Elsewhere("no answer in time")
    for sign, saying, for_good in _SAYINGS:
        if sign in words:
            return Elsewhere(saying, tls=for_good)
    return Elsewhere(words.removeprefix("etcdserver: ").strip()[:160] or code.name.lower())
