"""A run on two hosts that waits for itself: each agent sees only its own workers, and they come to the same end."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.agent.hosts.etcd_cluster import EtcdCluster
from holdfast.events import read_events
from holdfast.testing.observed_run import ObservedHosts, ObservedRun
from holdfast.trust.keys import create_keys

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180), pytest.mark.xdist_group("hosts")]
SCRIPT = [str(Path(__file__).parents[1] / "end_to_end" / "standing_still.py"), "--steps", "60"]


def test_the_agent_of_the_one_in_the_way_ends_it(tmp_path: Path) -> None:
    """One worker on each host. That of h2 has computed its shards and does not know; nobody is late by itself."""
    quiet = subprocess.run([sys.executable, *SCRIPT], capture_output=True, text=True, timeout=90, check=True)
    create_keys(tmp_path / "keys")
    with EtcdCluster(tmp_path / "etcd", 1) as cluster:
        options = ["--ledger", cluster.url, "--keys", str(tmp_path / "keys"), "--workers", "1", "--listen", "127.0.0.1"]
        options += ["--late-after", "none", "--checkpoint", str(tmp_path / "checkpoints")]
        hosts = []
        for name in ("h1", "h2"):
            (tmp_path / name).mkdir()
            script = [*SCRIPT, "--plant", "w0.1@h2:forget:30"]
            hosts.append(ObservedRun(tmp_path / name, "r", options, script, host=name))
        fleet = ObservedHosts(hosts)
        fleet.start()
        try:
            assert fleet.finish(120) == quiet.stdout.split()[-1]
        except BaseException:
            print(fleet.log())
            raise
        finally:
            fleet.end()
    told = [[one for one in read_events(host.directory.events) if one["kind"] == "standstill"] for host in hosts]
    (here,), (there,) = told
    assert here["worker"] == there["worker"] == "w0.1@h2"
    assert there["killed"] and not here["killed"]
    assert here["waits"] == {"w0.1@h1": "waiting for w0.1@h2 to be ready in step 30"}
    assert there["waits"] == {"w0.1@h2": "waiting for nothing that it knows of"}
