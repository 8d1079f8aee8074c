"""The ledger on etcd while the network is cut: every member and the client in a network namespace of its own."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.agent.hosts.etcd_cluster import EtcdCluster
from holdfast.testing.switchboard import Switchboard, why_not
from tests.harness import etcd_faults

from .contract import WAIT_S
from .etcd_serving import fresh_run, until

pytestmark = [pytest.mark.xdist_group("etcd"), pytest.mark.processes]

MEMBERS = ("e1", "e2", "e3")
MOVE_S = 3.0  # in which a watch leaves a member that cannot serve it
CUT_S = 8.0  # long enough for TCP to wait seconds between two attempts to send


@pytest.fixture(scope="module")
def board(etcd: str) -> Iterator[Switchboard]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with Switchboard([*MEMBERS, "client"]) as board:
        yield board


@pytest.fixture(scope="module")
def land(board: Switchboard, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    addresses = [board.address(member) for member in MEMBERS]
    commands = [board.command(member) for member in MEMBERS]
    directory = tmp_path_factory.mktemp("etcd")
    with EtcdCluster(directory, addresses=addresses, prefix_commands=commands) as cluster:
        yield cluster


class Client:
    """etcd_watching.py in its namespace."""

    def __init__(self, board: Switchboard, cluster: EtcdCluster) -> None:
        self.run = fresh_run()
        self.cluster = cluster
        self.lines: list[tuple[float, str, str]] = []
        script = Path(__file__).with_name("etcd_watching.py")
        self.process = subprocess.Popen(
            [*board.command("client"), sys.executable, os.fspath(script), cluster.url, self.run],
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            at, kind, *rest = line.split()
            self.lines.append((float(at), kind, " ".join(rest)))

    def close(self) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        assert self.process.stdout is not None
        self.process.stdout.close()

    def serving(self) -> int:
        """Which member serves the watch now."""
        until(lambda: any(kind == "serving" for _, kind, _ in self.lines), "the watch has a stream")
        address = [rest for _, kind, rest in self.lines if kind == "serving"][-1]
        return [self.cluster.address(index) for index in range(3)].index(address)

    def changes(self) -> list[str]:
        return [rest for _, kind, rest in self.lines if kind == "change"]

    def said_after(self, moment: float, kind: str) -> float | None:
        """How long after `moment` it first said this."""
        return next((at - moment for at, found, _ in tuple(self.lines) if found == kind and at >= moment), None)

    def wait_said(self, moment: float, kind: str, wait_s: float = WAIT_S) -> float:
        until(lambda: self.said_after(moment, kind) is not None, f"the client says {kind}: {self.lines[-5:]}", wait_s)
        took_s = self.said_after(moment, kind)
        assert took_s is not None
        return took_s

    def write(self, value: str, *, through: int) -> None:
        """A put through a member's own socket, where no network is in between."""
        body = {
            "key": base64.b64encode(f"/holdfast/runs/{self.run}/a".encode()).decode(),
            "value": base64.b64encode(value.encode()).decode(),
        }
        answer = etcd_faults.ask(self.cluster.members[through], "/v3/kv/put", body, timeout_s=WAIT_S)
        assert answer is not None, f"member {through} does not write"


@pytest.fixture
def client(board: Switchboard, land: EtcdCluster) -> Iterator[Client]:
    client = Client(board, land)
    try:
        client.wait_said(0.0, "answers", 2 * WAIT_S)
        client.serving()
        yield client
    finally:
        client.close()
        board.heal()
        land.wait_serving()


def test_a_watch_leaves_a_member_that_lost_its_majority(board: Switchboard, land: EtcdCluster, client: Client) -> None:
    """The client still reaches the member, and the member its client; only the others are beyond the cut."""
    member = client.serving()
    others = [index for index in range(3) if index != member]
    for other in others:
        board.cut(MEMBERS[member], MEMBERS[other])
    cut = time.monotonic()
    assert client.wait_said(cut, "serving") < MOVE_S
    assert client.serving() in others
    client.write("beyond", through=others[0])
    until(lambda: client.changes() == ["beyond"], "the change of the majority arrives")


def test_a_watch_leaves_a_member_that_cannot_be_reached(board: Switchboard, land: EtcdCluster, client: Client) -> None:
    member = client.serving()
    board.cut("client", MEMBERS[member])
    cut = time.monotonic()
    client.write("beyond", through=member)
    assert client.wait_said(cut, "change") < MOVE_S
    assert client.serving() != member
    assert client.changes() == ["beyond"]


def test_a_client_is_back_soon_after_a_long_cut(board: Switchboard, land: EtcdCluster, client: Client) -> None:
    """Nothing arrives and nothing is refused for seconds: no pause between attempts may have grown by then."""
    for member in MEMBERS:
        board.cut("client", member)
    cut = time.monotonic()
    client.write("meanwhile", through=etcd_faults.leader(land))
    client.wait_said(cut, "silent")
    client.wait_said(cut, "away")
    until(lambda: time.monotonic() - cut > CUT_S, "the cut lasts", 2 * CUT_S)
    assert client.changes() == []
    board.heal()
    healed = time.monotonic()
    assert client.wait_said(healed, "answers") < MOVE_S
    assert client.wait_said(healed, "change") < MOVE_S
    assert client.changes() == ["meanwhile"]
