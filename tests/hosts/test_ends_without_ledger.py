"""Runs on several hosts that end, or begin again, while the ledger or a host is away."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.agent.hosts.etcd_cluster import EtcdCluster
from holdfast.core.errors import EXIT_UNWRITTEN
from holdfast.ledger.etcd import list_runs
from holdfast.testing.observed_run import ObservedHosts, ObservedRun
from holdfast.trust.keys import create_keys

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180), pytest.mark.xdist_group("hosts")]

TINY = Path(__file__).parents[1] / "agent" / "tiny_training.py"
STEPS = 400
HELD = 300
WAITS = "waiting up to 30 s to write down that the run is finished"


class Hosts(ObservedHosts):
    """Agents on loopback, each in a home of its own, and an etcd of one."""

    def __init__(self, home: Path, cluster: EtcdCluster, *names: str) -> None:
        self.gate = home / "gate"
        self.open_to(1)
        self._home = home
        self._cluster = cluster
        create_keys(home / "keys")
        super().__init__(self._agent(name) for name in names)

    def _agent(self, name: str) -> ObservedRun:
        home = self._home / name
        home.mkdir(exist_ok=True)
        options = ["--ledger", self._cluster.url, "--keys", str(self._home / "keys"), "--workers", "1"]
        options += ["--outage", "30", "--listen", "127.0.0.1", "--checkpoint", str(self._home / "checkpoints")]
        return ObservedRun(home, "r", options, [str(TINY), "--steps", str(STEPS), "--gate", str(self.gate)], host=name)

    def come(self, name: str) -> ObservedRun:
        self.hosts[name] = self._agent(name)
        self.hosts[name].start()
        return self.hosts[name]

    def open_to(self, step: int) -> None:
        self.open_below = step
        partial = self.gate.with_suffix(".new")
        partial.write_text(str(step))
        partial.replace(self.gate)

    def together(self) -> bool:
        """Until both are members steps pass slowly: whoever comes later is let in between two of them."""
        if len(self.members) == 2:
            return True
        self.open_to(min(self.open_below + 1, HELD))
        return False

    def held(self) -> bool:
        """Progress is told too rarely to know it from that."""
        places = [self.gate.with_name(f"at-{member}") for member in self.members]
        return all(place.exists() and place.read_text() == str(HELD) for place in places)

    def said(self, text: str) -> bool:
        return all(text in host.log() for name, host in self.hosts.items() if name not in self.off)

    def codes(self, timeout_s: float = 60.0) -> list[int | None]:
        self.wait(self.over, "the end of all agents", timeout_s)
        return [host.agent.returncode for host in self.hosts.values() if host.agent is not None]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[EtcdCluster]:
    with EtcdCluster(tmp_path / "etcd", 1) as cluster:
        yield cluster


@pytest.fixture
def hosts(tmp_path: Path, cluster: EtcdCluster) -> Iterator[Hosts]:
    hosts = Hosts(tmp_path, cluster, "h1", "h2")
    hosts.start()
    try:
        hosts.wait(hosts.together, "both hosts to be members", period_s=0.2)
        hosts.open_to(HELD)
        hosts.wait(hosts.held, "both hosts to come to the gate")
        yield hosts
    except BaseException:
        print(hosts.log())
        raise
    finally:
        hosts.end()


def finish_without_ledger(hosts: Hosts, cluster: EtcdCluster) -> None:
    cluster.kill(0)
    hosts.gate.unlink()
    hosts.wait(lambda: hosts.said(WAITS), "the agents to say what they wait for")


def test_the_end_is_written_down_when_the_ledger_is_back(hosts: Hosts, cluster: EtcdCluster) -> None:
    finish_without_ledger(hosts, cluster)
    cluster.restart(0)
    assert hosts.codes() == [0, 0]
    assert hosts.said("the ledger is back, and says that the run is finished")
    assert [run.done for run in list_runs(cluster.url)] == [True]
    late = hosts.come("h3")
    hosts.wait(hosts.over, "the host that came late", 60)
    assert f"run r was finished, at step {STEPS}" in late.log()  # and its checkpoint is known, so it could go on
    assert f"training resumes at step {STEPS}" in late.log() and f"run r is finished: {STEPS} steps" in late.log()
    assert "begins again" not in late.log() and late.agent is not None and late.agent.returncode == 0
    assert [run.done for run in list_runs(cluster.url)] == [True]
    assert "Traceback" not in hosts.log()


def test_an_end_that_is_not_written_down_is_another_code_and_nothing_is_trained_again(
    hosts: Hosts, cluster: EtcdCluster
) -> None:
    finish_without_ledger(hosts, cluster)
    for host in hosts.hosts.values():
        assert host.agent is not None
        host.agent.send_signal(signal.SIGINT)
    assert hosts.codes() == [EXIT_UNWRITTEN, EXIT_UNWRITTEN]
    assert hosts.said("the ledger does not know that run r is finished")
    cluster.restart(0)
    late = hosts.come("h3")
    hosts.wait(lambda: "holdfast give-up r h1 h2" in late.log(), "the new host to say for whom it waits", 60)
    assert "for 9" in late.log() or "for 8" in late.log()  # of 90 s
    # Their leases came back with the ledger, for seconds: until then they take part.
    hosts.wait(lambda: give_up(late, "h1", "h2").returncode == 0, "h1 and h2 to be given up", 30)
    hosts.wait(hosts.over, "the host that came late", 60)
    assert late.agent is not None and late.agent.returncode == 0, late.log()
    assert f"training resumes at step {STEPS}" in late.log()
    assert "begins again" not in late.log()
    assert [run.done for run in list_runs(cluster.url)] == [True]
    assert "Traceback" not in hosts.log()


def test_after_the_loss_of_all_but_one_host_it_is_said_who_was_lost(hosts: Hosts, cluster: EtcdCluster) -> None:
    """And it counts as a failure. `give-up` does not take a host that takes part, nor one that is not known."""
    here, gone = hosts.hosts["h1"], hosts.hosts["h2"]
    assert "takes part in run r" in give_up(here, "h2").stderr
    assert "no worker of host h9" in give_up(here, "h9").stderr
    hosts.power_off("h2")
    hosts.gate.unlink()
    assert hosts.codes() == [0, gone.agent.returncode if gone.agent else None]
    log = here.log()
    assert "w0.1@h2 is lost to w0.1@h1 at step" in log
    assert "w0.1@h1 is lost" not in log
    assert "1 failure survived" in log
    assert "Traceback" not in log


def give_up(host: ObservedRun, *names: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "holdfast", "give-up", "--dir", str(host.home), f"r@{host.host}", *names]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
