"""A worker's lines to the others, to the ledger, and to those who want to know what it does."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.engine.ledger_feed import LedgerFeed
from holdfast.engine.spending import Spending
from holdfast.events import EventLog
from holdfast.net.mailbox import Mailbox
from holdfast.net.wires import Wires


@dataclass(frozen=True, kw_only=True)
class Lines:
    """A worker's lines to the others, to the ledger, and to those who want to know what it does."""

    wires: Wires
    mailbox: Mailbox
    feed: LedgerFeed
    events: EventLog
    spending: Spending
