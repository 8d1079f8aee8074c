"""What tests ask of the members of an etcd on this host, and do to them, beside killing them."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from holdfast.agent.hosts.etcd_cluster import EtcdCluster
from holdfast.agent.hosts.etcd_member import EtcdMember

WAIT_S = 30.0
FREEZE_S = 10.0


def leader(cluster: EtcdCluster) -> int:
    """Who leads, as a majority of the members says. Waits for an election."""
    deadline = time.monotonic() + WAIT_S
    while (found := _leader_now(cluster)) is None:
        assert time.monotonic() < deadline, f"no etcd member leads after {WAIT_S:g} s"
        time.sleep(0.02)
    return found


def followers(cluster: EtcdCluster) -> list[int]:
    leading = leader(cluster)
    return [index for index in range(len(cluster.members)) if index != leading]


def _leader_now(cluster: EtcdCluster) -> int | None:
    ids: dict[str, int] = {}
    votes: dict[tuple[str, str], int] = {}
    for index, member in enumerate(cluster.members):
        status = ask(member, "/v3/maintenance/status", {}, timeout_s=0.5) if member.alive else None
        if status is not None:
            ids[status["header"]["member_id"]] = index
            vote = (status.get("leader", "0"), status.get("raftTerm", "0"))
            votes[vote] = votes.get(vote, 0) + 1
    for (leading, _), count in votes.items():
        if leading in ids and 2 * count > len(cluster.members):
            return ids[leading]
    return None


def ask(member: EtcdMember, path: str, body: Mapping[str, Any], timeout_s: float = 2.0) -> dict[str, Any] | None:
    """One of etcd's calls in its JSON form; None if it does not answer or refuses."""
    text = member.request("POST", path, json.dumps(body), timeout_s)
    return None if text is None else dict(json.loads(text))


def metrics(member: EtcdMember) -> dict[str, float]:
    """etcd's counters by name (with labels as it writes them); {} if it does not answer."""
    found: dict[str, float] = {}
    for line in (member.request("GET", "/metrics") or "").splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name] = float(value)
    return found


def freeze(cluster: EtcdCluster, index: int) -> None:
    """SIGSTOP: its connections stay open, and it says nothing. Waits until none of its threads runs any more."""
    member = cluster.members[index]
    member.signal(signal.SIGSTOP)
    deadline = time.monotonic() + FREEZE_S
    while member.alive and not _stopped(member.pid) and time.monotonic() < deadline:
        time.sleep(0.001)


def _stopped(pid: int) -> bool:
    try:
        stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
    except OSError:  # a thread ended meanwhile
        return False
    return all(stat.rpartition(")")[2].split()[0] in "Tt" for stat in stats)


def thaw(cluster: EtcdCluster, index: int) -> None:
    cluster.members[index].signal(signal.SIGCONT)
