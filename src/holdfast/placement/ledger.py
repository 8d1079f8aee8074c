"""Which ledger a run has, and how to reach it: etcd for a run on several hosts, else the one that its agent serves."""

from __future__ import annotations

from pathlib import Path

from holdfast.ledger.embedded import EmbeddedLedger
from holdfast.ledger.port import Ledger


def open_ledger(url: str, run: str, socket: Path, secret: bytes) -> Ledger:
    """A client. `url` is etcd's; empty for the agent's own ledger, which listens on `socket`."""
    if not url:
        return EmbeddedLedger(socket, secret)
    from holdfast.ledger.etcd import open_etcd  # loads grpc, which a run on one host does without

    return open_etcd(url, run)
