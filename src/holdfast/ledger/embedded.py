"""The embedded ledger: a server for the agent of a single host, and the client that its workers use.

The server is durable: it can be killed at any moment and started again on the same directory, by this agent or by the
next, and no write that was acknowledged is lost. While it is away, clients raise LedgerUnavailable and training goes
on; when it is back, they find it by themselves.
"""

from __future__ import annotations

from holdfast.ledger.client import EmbeddedLedger, EmbeddedWatch
from holdfast.ledger.connection import ConnectionPatience
from holdfast.ledger.server import EmbeddedServer, ServerLimits

__all__ = ["ConnectionPatience", "EmbeddedLedger", "EmbeddedServer", "EmbeddedWatch", "ServerLimits"]
