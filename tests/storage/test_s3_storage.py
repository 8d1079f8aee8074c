"""Storage on a real S3 server keeps the contract."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from holdfast.checkpoint.storage.opening import open_storage
from holdfast.checkpoint.storage.port import Storage
from tests.harness import s3_server
from tests.harness.s3_server import S3Server

from .storage_contract import MIB, WAIT_S, SharedStorageContract

pytestmark = [
    pytest.mark.skipif(bool(s3_server.why_not()), reason=s3_server.why_not() or "-"),
    pytest.mark.xdist_group("s3"),
]

_numbers = itertools.count()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        server.make_bucket("checkpoints")
        yield server


@pytest.fixture
def credentials(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in server.environment().items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def place(server: S3Server, credentials: None) -> str:
    """A bucket and a prefix that nobody has used."""
    return f"checkpoints/run-{next(_numbers)}"


class TestS3Storage(SharedStorageContract):
    kill_bytes = 32 * MIB  # four parts

    @pytest.fixture
    def storage(self, server: S3Server, place: str) -> Storage:
        return open_storage(f"{server.uri(place)}&timeout_s={WAIT_S:g}")  # the machine is busy, the server not quick
