"""Parameter servers on several hosts, with the ledger on a real etcd: hosts that train too, and hosts that only serve.

The hosts are on loopback: each has an agent, a name and processes of its own. Power is lost by kill -9 of all of them.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from hosts_harness import wall

from holdfast.agent.hosts.etcd_cluster import EtcdCluster, find_etcd
from holdfast.core.errors import ConfigError, LedgerError
from holdfast.core.words import KEY_SERVERS, KEY_SLICE, KEY_TARGETS, decode_json, host_of
from holdfast.ledger.etcd import open_etcd
from holdfast.log.configuration import Configuration
from holdfast.servers.log_codec import decode_configuration
from holdfast.servers.placing import Target
from holdfast.testing.observed_run import ObservedHosts, ObservedRun
from holdfast.trust.keys import create_keys

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300), pytest.mark.xdist_group("hosts")]
STEPS = 900
SCRIPT = str(Path(__file__).parents[1] / "modes" / "asynchronous_training.py")


class Served(ObservedHosts):
    """An asynchronous training, with the options of each host. A host without workers gets no script."""

    def __init__(self, home: Path, cluster: EtcdCluster, steps: int, hosts: dict[str, Sequence[str]]) -> None:
        self.home = home
        self.cluster = cluster
        self.hurry = home / "hurry"
        saved = ["--checkpoint", str(home / "saved"), "--save-every", "1h"]
        common = ["--ledger", cluster.url, "--keys", str(home / "keys"), "--listen", "127.0.0.1", *saved]
        script = [SCRIPT, "--steps", str(steps), "--shard-s", "0.1", "--hurry", str(self.hurry)]
        super().__init__(
            ObservedRun(home, "r", [*common, *options], script if "--workers" in options else [], host=host)
            for host, options in hosts.items()
        )
        self._ledger = open_etcd(cluster.url, "r")

    @property
    def slices(self) -> dict[str, Configuration]:
        with suppress(LedgerError):
            entries = self._ledger.read(KEY_SLICE).entries
            return {one.key[len(KEY_SLICE) :]: decode_configuration(decode_json(one.value)) for one in entries}
        return {}

    @property
    def servers(self) -> list[str]:
        return [one.key[len(KEY_SERVERS) :] for one in self._ledger.read(KEY_SERVERS).entries]

    def move(self, slice_name: str, target: Target) -> None:
        self._ledger.put(KEY_TARGETS + slice_name, target.encode())

    def told(self, kind: str) -> list[dict[str, Any]]:
        self.look()
        return [event for event in self.events if event["kind"] == kind]

    def wait_more(self, steps: int, timeout_s: float = 90.0) -> None:
        at = self.step
        self.wait(lambda: self.step >= at + steps, f"{steps} more steps", timeout_s)

    def wait_slices(self, condition: Callable[[Configuration], bool], what: str, timeout_s: float = 60.0) -> None:
        self.wait(lambda: bool(self.slices) and all(map(condition, self.slices.values())), what, timeout_s)

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "holdfast", *words, "--dir", str(self.home)]
        return subprocess.run(command, capture_output=True, text=True, timeout=60)

    def exit_code(self, host: str, timeout_s: float = 60.0) -> int:
        agent = self.hosts[host].agent
        assert agent is not None
        return agent.wait(timeout_s)

    def end(self) -> None:
        self._ledger.close()
        super().end()


@contextmanager
def served(home: Path, steps: int, **hosts: Sequence[str]) -> Iterator[Served]:
    """Started, and ended with the block, whatever happens; a failure shows what the agents said."""
    try:
        find_etcd()
    except ConfigError as error:
        pytest.skip(error.message)
    create_keys(home / "keys")
    with EtcdCluster(home / "etcd", members=1) as cluster:
        run = Served(home, cluster, steps, hosts)
        run.start()
        try:
            yield run
        except BaseException:
            print(run.log())
            raise
        finally:
            run.end()


def hosts_of(configuration: Configuration) -> set[str]:
    return {host_of(server) for server in configuration.replicas}


def test_a_host_with_a_primary_loses_power_and_no_acknowledged_update_is_lost(tmp_path: Path) -> None:
    """Agent, workers and server at once. Before that, nobody reaches the ledger for a while, and steps go on."""
    trains, serves = ["--workers", "1", "--servers", "1"], ["--servers", "1"]
    with served(tmp_path, STEPS, h1=trains, h2=trains, h3=serves) as run:
        run.wait(lambda: run.step > 10, "steps", 90)
        run.wait_slices(lambda one: hosts_of(one) == {"h1", "h2", "h3"}, "every slice on all hosts")
        assert "h3, which only serves (1 server)" in run.hosts["h3"].log()
        before, down = run.step, wall()
        run.cluster.kill(0)
        run.wait(lambda: wall() - down > 6.0 and run.step > before + 10, "steps without a ledger", 60)
        run.cluster.restart(0)
        run.wait(lambda: len(run.servers) == 3, "all servers to be registered", 60)
        run.wait_slices(lambda one: hosts_of(one) == {"h1", "h2", "h3"}, "every slice on all hosts", 90)
        leader = next(server for server in run.slices["parameters/0"].replicas if host_of(server) == "h1")
        run.move("parameters/0", Target(run.slices["parameters/0"].replicas, leader))
        run.wait(lambda: run.slices["parameters/0"].primary == leader, "h1 to lead", 30)
        run.power_off("h1")
        run.wait(lambda: run.slices["parameters/0"].primary != leader, "another primary", 30)
        run.wait_more(15)
        run.wait_slices(lambda one: leader not in one.replicas, "slices without h1", 60)
        run.power_on("h1")
        run.wait_slices(lambda one: hosts_of(one) == {"h1", "h2", "h3"}, "every slice on all hosts again", 90)
        run.hurry.touch()
        assert [run.exit_code(host, 120) for host in ("h1", "h2", "h3")] == [0, 0, 0]
        assert "run r is finished; this host has served it to the end" in run.hosts["h3"].log()
        acknowledged = sum(sum(event["updates"].values()) for event in run.told("staleness"))
        last = max(run.told("captured"), key=lambda event: event["t"])
        assert last["next"] == STEPS and not last["left"]
        assert acknowledged <= min(last["versions"]), "an acknowledged update is lost"
        assert min(last["versions"]) >= STEPS and max(last["versions"]) <= STEPS + 3, (
            "one of h1's worker may be in twice"
        )
        assert not run.told("slices_lost")


def test_slices_leave_a_host_that_leaves_and_it_ends_with_the_run(tmp_path: Path) -> None:
    """With one copy of each slice, so that a host that just ended would take them with it."""
    options = ["--servers", "1", "--replicas", "1"]
    with served(tmp_path, 100_000, h1=["--workers", "1", *options], h2=options) as run:
        run.wait(lambda: run.step > 10, "steps", 90)
        run.wait(lambda: len(run.servers) == 2, "both servers", 60)
        there = next(server for server in run.servers if host_of(server) == "h2")
        run.move("parameters/0", Target((there,)))
        run.wait(lambda: run.slices["parameters/0"].replicas == (there,), "the slice to move to h2", 60)
        agent = run.hosts["h2"].agent
        assert agent is not None
        agent.send_signal(signal.SIGINT)
        assert run.exit_code("h2") == 130
        assert "Ctrl-C: this host's slices move to other servers, and it leaves" in run.hosts["h2"].log()
        assert "this host has left run r (Ctrl-C)" in run.hosts["h2"].log()
        assert all(hosts_of(one) == {"h1"} for one in run.slices.values()), run.slices
        assert not run.told("slices_lost")
        run.wait_more(10)
        run.power_on("h2")
        run.wait(lambda: len(run.servers) == 2, "the server of h2 again", 60)
        refused = run.command("scale", "r@h2", "3")
        assert refused.returncode == 2 and "only serves" in refused.stderr, refused
        assert "this host only serves" in run.command("status", "r@h2").stdout
        assert run.command("stop", "r@h1").returncode == 0
        assert [run.exit_code(host, 90) for host in ("h1", "h2")] == [0, 0]
        assert "run r is stopped (asked to stop)" in run.hosts["h2"].log()
        last = max(run.told("captured"), key=lambda event: event["t"])
        assert set(last["versions"]) == {last["next"] - last["left"]}, (
            "every step that was made is in every slice, once"
        )
