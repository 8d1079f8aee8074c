"""Real etcd clusters for tests, and what only an administrator does to them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping

from holdfast.ledger.etcd import open_etcd
from holdfast.ledger.etcd.ledger import EtcdLedger

from .contract import WAIT_S

_numbers = itertools.count(1)


def fresh_run() -> str:
    """A run that nobody has used: tests share clusters, not runs."""
    return f"test-{os.getpid()}-{next(_numbers)}"


class EtcdFactory:
    """A contract.LedgerFactory. Its ledger is a run that is new in a cluster that is not."""

    ttl_granularity_s = 1.0  # with the election timeout of the clusters here; etcd never rounds below
    expiry_slack_s = 2.5  # etcd looks for leases that ran out twice a second, and deletes through Raft

    def __init__(self, url: str, run: str = "", environ: Mapping[str, str] | None = None) -> None:
        self.url = url
        self.run = run or fresh_run()
        self.environ = environ or {}

    def open(self, *, deadline_s: float = WAIT_S) -> EtcdLedger:
        return open_etcd(self.url, self.run, deadline_s=deadline_s, environ=self.environ)
