"""Storage on HDFS: the contract that all storages keep, on a real NameNode and DataNode."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator

import pytest

from holdfast.checkpoint.storage.hdfs import HdfsStorage
from holdfast.checkpoint.storage.hdfs_errors import translated
from holdfast.core.errors import ConfigError, IntegrityError, StorageError, StorageRefused, StorageUnavailable
from tests.harness.hdfs_server import HdfsCluster

from .storage_contract import MIB, SharedStorageContract

pytestmark = pytest.mark.xdist_group("hdfs")

_numbers = itertools.count()


@pytest.fixture
def storage(cluster: HdfsCluster) -> Iterator[HdfsStorage]:
    storage = HdfsStorage(f"{cluster.uri}/runs/run-{next(_numbers)}")
    yield storage
    storage.close()


class TestHdfs(SharedStorageContract):
    kill_bytes = 24 * MIB
    kill_at = (0.1, 0.5, 0.9)

    @pytest.fixture
    def storage(self, storage: HdfsStorage) -> HdfsStorage:
        return storage


# -- what can be known without a server


@pytest.mark.parametrize(
    "uri",
    [
        "hdfs://no-such-nameservice/runs",
        "hdfs:///runs",
        "hdfs://host:port/runs",
        "hdfs://host:0/runs",
        "hdfs://host:99999/runs",
        "hdfs://host:9000/runs/../other",
        "hdfs://host:9000/runs/a:b",
        "hdfs://host:9000/runs?user=me",
        "hdfs://host:9000/runs#part",
    ],
)
def test_what_leads_nowhere_is_refused_at_once(uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HADOOP_CONF_DIR", raising=False)
    monkeypatch.delenv("HADOOP_HOME", raising=False)
    with pytest.raises(ConfigError, match="hdfs://") as caught:
        HdfsStorage(uri)
    assert caught.value.hint


def test_a_user_in_the_uri_is_not_repeated() -> None:
    with pytest.raises(ConfigError) as caught:
        HdfsStorage("hdfs://me:secret@host:9000/runs")
    assert "HADOOP_USER_NAME" in caught.value.hint and "secret" not in str(caught.value)


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hdfs_native", None)
    with pytest.raises(ConfigError, match="hdfs-native") as caught:
        HdfsStorage("hdfs://127.0.0.1:9000/runs")
    assert "holdfast[hdfs]" in caught.value.hint


def test_nobody_there_and_no_such_host() -> None:
    nobody = HdfsStorage("hdfs://127.0.0.1:1/runs")
    for call in (lambda: nobody.read("a", 1), lambda: nobody.create("a", b"")):
        with pytest.raises(StorageUnavailable, match="refused"):
            call()
    with pytest.raises(StorageRefused, match="no host"):
        HdfsStorage("hdfs://no-such-host.invalid:9000/runs").list()


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        (
            'RPCError("java.io.IOException", "File /a could only be replicated to 0 nodes instead of minReplication '
            '(=1).  There are 0 datanode(s) running\\n\\tat org.apache.hadoop.x(X.java:1)")',
            StorageUnavailable,
            "0 datanode",
        ),
        ('DataTransferError("All nodes failed for write")', StorageUnavailable, "All nodes failed"),
        ('RPCError("org.apache.hadoop.ipc.StandbyException", "state standby")', StorageUnavailable, "standby"),
        (
            'RPCError("org.apache.hadoop.hdfs.protocol.DSQuotaExceededException", "The DiskSpace quota is exceeded")',
            StorageUnavailable,
            "quota",
        ),
        (
            'FatalRPCError("org.apache.hadoop.security.authorize.AuthorizationException", "User: x is not allowed")',
            StorageRefused,
            "not allowed",
        ),
        ('SASLError("no credentials")', StorageRefused, "no credentials"),
        ("NoSASLMechanism", StorageRefused, "NoSASLMechanism"),
        ("ChecksumError", IntegrityError, "checksum"),
        ("something\nnew", StorageUnavailable, "something"),
    ],
)
def test_errors_say_who_must_act(text: str, kind: type[StorageError], says: str) -> None:
    error = translated(RuntimeError(text), "write /a", "host:9000")
    assert type(error) is kind
    assert says in error.message and "\n" not in error.message and "\\n" not in error.message
