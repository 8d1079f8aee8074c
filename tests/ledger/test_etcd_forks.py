"""Loader processes are forked while the client works: nothing hangs, and nothing is written to stderr."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.agent.hosts.etcd_cluster import EtcdCluster

from .etcd_serving import fresh_run

pytestmark = pytest.mark.xdist_group("etcd")

SCRIPT = Path(__file__).parent / "etcd_forking.py"


@pytest.mark.processes
def test_forking_while_a_watch_is_open(three_members: EtcdCluster, tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), three_members.url, fresh_run()]
    said = tmp_path / "stderr"
    with said.open("w") as file:  # not a pipe, which a child that hangs would keep open
        done = subprocess.run(command, stderr=file, timeout=120, check=False)
    assert (done.returncode, said.read_text()) == (0, "")
