"""In steady state nothing is written to the ledger: counted by etcd itself, under a real run with two agents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.agent.hosts.etcd_cluster import EtcdCluster, find_etcd
from holdfast.core.errors import ConfigError
from holdfast.ledger.etcd import open_etcd
from holdfast.testing.observed_run import ObservedHosts, ObservedRun
from holdfast.trust.keys import create_keys
from tests.harness import etcd_faults
from tests.soak.exactness import SCRIPT

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240), pytest.mark.xdist_group("hosts")]

STEPS = 60
# All that changes etcd: keys written, transactions and deletions, and whatever went through Raft.
WRITES = (
    "etcd_mvcc_put_total",
    "etcd_mvcc_delete_total",
    "etcd_mvcc_txn_total",
    "etcd_server_proposals_committed_total",
)
RENEWALS = "etcd_debugging_lease_renewed_total"


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[EtcdCluster]:
    try:
        find_etcd()
    except ConfigError as error:
        pytest.skip(error.message)
    with EtcdCluster(tmp_path / "etcd") as cluster:
        yield cluster


def counted(cluster: EtcdCluster, *names: str) -> dict[str, float]:
    """Of the member that has seen most. All of them apply every write, but one may lag a little."""
    found = [etcd_faults.metrics(member) for member in cluster.members]
    assert all(found), "a member does not answer"
    return {name: max(metrics[name] for metrics in found) for name in names}


def test_steps_write_nothing_to_the_ledger(cluster: EtcdCluster, tmp_path: Path) -> None:
    create_keys(tmp_path / "keys")
    options = ["--ledger", cluster.url, "--keys", str(tmp_path / "keys"), "--workers", "1", "--listen", "127.0.0.1"]
    script = [SCRIPT, "--steps", "100000", "--pause", "0.005"]
    fleet = ObservedHosts(ObservedRun(tmp_path, "r", options, script, host=host) for host in ("alpha", "beta"))
    fleet.start()
    try:
        fleet.wait(lambda: len(fleet.members) == 2 and fleet.step >= 5, "both hosts to train", 90.0)
        started_at, view = fleet.step, fleet.view
        fleet.wait(lambda: fleet.step >= started_at + 10, "what joining wrote to settle", 60.0)
        before, first = counted(cluster, *WRITES, RENEWALS), fleet.step
        fleet.wait(lambda: fleet.step >= first + STEPS, f"{STEPS} more steps", 90.0)
        after = counted(cluster, *WRITES, RENEWALS)
        assert fleet.view == view, "the membership changed, so this says nothing"
        assert {name: after[name] - before[name] for name in WRITES} == dict.fromkeys(WRITES, 0)
        assert after[RENEWALS] > before[RENEWALS], "leases are kept alive, so the counters are not dead"
    finally:
        fleet.end()

    quiet = counted(cluster, *WRITES)
    ledger = open_etcd(cluster.url, "r")
    ledger.put("one", b"")
    ledger.close()
    loud = counted(cluster, *WRITES)
    assert all(loud[name] > quiet[name] for name in WRITES), "one write shows in every counter"
