from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

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
