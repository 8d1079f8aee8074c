"""Which ledger a run has, and how to reach it: etcd for a run on several hosts, else the one that its agent serves.

A launcher that has every host of the run in its hands, such as Ray's driver, may serve the embedded one to all of them:
holdfast://HOST:PORT.
"""

from __future__ import annotations

from pathlib import Path

from holdfast.ledger.embedded import EmbeddedLedger
from holdfast.ledger.port import Ledger
from holdfast.trust.keys import Keys

SERVED = "holdfast://"


def open_ledger(url: str, run: str, socket: Path, secret: bytes, keys: Keys | None = None) -> Ledger:
    """A client. `url` is etcd's, or a launcher's; empty for the agent's own ledger, which listens on `socket`."""
    if not url:
        return EmbeddedLedger(socket, secret)
    if url.startswith(SERVED):
        return EmbeddedLedger.at("tcp:" + url.removeprefix(SERVED), keys or Keys.from_secret(secret))
    from holdfast.ledger.etcd import open_etcd  # loads grpc, which a run on one host does without

    return open_etcd(url, run)
