"""Servers that several files of tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.harness.hdfs_server import HdfsCluster, why_not


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HdfsCluster]:
    if reason := why_not():
        pytest.skip(reason)
    with HdfsCluster(tmp_path_factory.mktemp("hdfs")) as cluster:
        yield cluster
