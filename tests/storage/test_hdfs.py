"""Storage on HDFS: the contract that all storages keep, on a real NameNode and DataNode."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.checkpoint.storage.hdfs import HdfsStorage
from holdfast.testing.hdfs_server import HdfsCluster, why_not

from .storage_contract import MIB, SharedStorageContract

pytestmark = pytest.mark.xdist_group("hdfs")

_numbers = itertools.count()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HdfsCluster]:
    if reason := why_not():
        pytest.skip(reason)
    with HdfsCluster(tmp_path_factory.mktemp("hdfs")) as cluster:
        yield cluster


@pytest.fixture
def storage(cluster: HdfsCluster) -> Iterator[HdfsStorage]:
    storage = HdfsStorage(f"{cluster.uri}/runs/run-{next(_numbers)}")
    yield storage
    storage.close()


class TestHdfs(SharedStorageContract):
    kill_bytes = 24 * MIB
    kill_at = (0.1, 0.4, 0.7, 0.9)

    @pytest.fixture
    def storage(self, storage: HdfsStorage) -> HdfsStorage:
        return storage
