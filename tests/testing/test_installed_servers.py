"""What the scripts of this checkout installed for tests is found: else whole suites would be skipped unnoticed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from holdfast.agent.hosts.etcd_member import BINARY, find_etcd
from tests.harness import ROOT, hdfs_server

ETCD, JARS = ROOT / ".tools" / "etcd" / "usr" / "bin" / "etcd", ROOT / ".tools" / "hadoop" / "jars"


def test_etcd(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ETCD.exists():
        pytest.skip("make install found an etcd elsewhere, or none")
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    monkeypatch.delenv(BINARY, raising=False)
    assert Path(find_etcd()).resolve() == ETCD.resolve()  # .tools may be a link to another checkout's


def test_hadoop() -> None:
    if not JARS.exists():
        pytest.skip("make install could not have Hadoop's jars")
    assert hdfs_server._jars().resolve() == JARS.resolve()
