"""The contract of contract.py, on the ledgers that need nothing but this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.ledger.embedded import EmbeddedLedger, EmbeddedServer
from holdfast.ledger.memory import MemoryLedger
from holdfast.ledger.port import Ledger

from .contract import WAIT_S, LedgerContract, LedgerFactory
from .serving import SECRET


class MemoryFactory:
    ttl_granularity_s = 0.01
    expiry_slack_s = 0.5

    def __init__(self) -> None:
        self._first = MemoryLedger()

    def open(self) -> Ledger:
        return self._first.another()


class EmbeddedFactory:
    ttl_granularity_s = 0.01
    expiry_slack_s = 0.5

    def __init__(self, socket_path: Path) -> None:
        self._socket_path = socket_path

    def open(self) -> Ledger:
        return EmbeddedLedger(self._socket_path, SECRET, timeout_s=WAIT_S)


class TestMemory(LedgerContract):
    @pytest.fixture
    def factory(self) -> LedgerFactory:
        return MemoryFactory()


class TestEmbedded(LedgerContract):
    @pytest.fixture
    def factory(self, server: EmbeddedServer, socket_path: Path) -> Iterator[LedgerFactory]:
        yield EmbeddedFactory(socket_path)
        assert server.alive
