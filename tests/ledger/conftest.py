from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.agent.hosts.etcd_cluster import EtcdCluster, find_etcd
from holdfast.core.errors import ConfigError
from holdfast.ledger.embedded import EmbeddedLedger, EmbeddedServer

from .serving import SECRET, ServerProcess


@pytest.fixture
def socket_path() -> Iterator[Path]:
    """A path short enough for a socket, which pytest's own temporary directories may not be."""
    directory = Path(tempfile.mkdtemp(prefix="hf"))
    yield directory / "ledger.sock"
    shutil.rmtree(directory)


@pytest.fixture
def server(tmp_path: Path, socket_path: Path) -> Iterator[EmbeddedServer]:
    server = EmbeddedServer(tmp_path / "ledger", socket_path, SECRET)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def client(server: EmbeddedServer, socket_path: Path) -> Iterator[EmbeddedLedger]:
    ledger = EmbeddedLedger(socket_path, SECRET)
    yield ledger
    ledger.close()


@pytest.fixture
def process(tmp_path: Path, socket_path: Path) -> Iterator[ServerProcess]:
    process = ServerProcess(tmp_path / "ledger", socket_path)
    yield process
    process.kill()


@pytest.fixture(scope="session")
def etcd() -> str:
    """The etcd on this machine; tests that need one are skipped without."""
    try:
        return find_etcd()
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def one_member(etcd: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path_factory.mktemp("etcd"), 1) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def three_members(etcd: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """All three serve when a test begins; it leaves them so."""
    with EtcdCluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster
