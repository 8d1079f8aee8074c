"""The contract of contract.py, on the ledgers that need nothing but this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from holdfast.core.errors import LedgerError
from holdfast.ledger.embedded import EmbeddedLedger, EmbeddedServer
from holdfast.ledger.memory import MemoryLedger
from holdfast.ledger.port import Ledger
from holdfast.trust.keys import Keys, create_keys

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


class ServedFactory(EmbeddedFactory):
    def __init__(self, server: EmbeddedServer, keys: Keys) -> None:
        self._server = server
        self._keys = keys

    def open(self) -> Ledger:
        return EmbeddedLedger.at(self._server.tcp_address, self._keys, timeout_s=WAIT_S)


class TestMemory(LedgerContract):
    @pytest.fixture
    def factory(self) -> LedgerFactory:
        return MemoryFactory()


class TestEmbedded(LedgerContract):
    @pytest.fixture
    def factory(self, server: EmbeddedServer, socket_path: Path) -> Iterator[LedgerFactory]:
        yield EmbeddedFactory(socket_path)
        assert server.alive


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    return create_keys(tmp_path_factory.mktemp("made") / "keys")


class TestServedToOtherHosts(LedgerContract):
    """The same server, over TCP with TLS and the run's keys."""

    @pytest.fixture
    def served(self, tmp_path: Path, socket_path: Path, keys: Keys) -> Iterator[EmbeddedServer]:
        server = EmbeddedServer(tmp_path / "l", socket_path, keys.secret, listen="127.0.0.1", keys=keys)
        server.start()
        yield server
        assert server.alive
        server.stop()

    @pytest.fixture
    def factory(self, served: EmbeddedServer, keys: Keys) -> LedgerFactory:
        return ServedFactory(served, keys)

    def test_clients_find_it_where_it_was_and_strangers_stay_out(
        self, served: EmbeddedServer, keys: Keys, tmp_path: Path
    ) -> None:
        address = served.tcp_address
        with closing(EmbeddedLedger.at(address, keys, timeout_s=WAIT_S)) as ledger:
            ledger.put("a", b"1")
            with closing(ledger.watch("w/", revision=ledger.put("a", b"1"))) as watch:
                assert watch.next(0.5) == watch.next(0.0) == ()  # TLS has a word of its own for "nothing yet"
            served.stop()
            served.start()
            entry = ledger.get("a")
            assert served.tcp_address == address and entry is not None and entry.value == b"1"
        for others in (create_keys(tmp_path / "others"), Keys.from_secret(keys.secret), Keys.from_secret(SECRET)):
            with closing(EmbeddedLedger.at(address, others, timeout_s=0.5)) as stranger, pytest.raises(LedgerError):
                stranger.get("a")
