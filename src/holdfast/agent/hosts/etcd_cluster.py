"""A ready etcd on this host: for `holdfast ledger start`, for trying things out, for drills and tests.

    with EtcdCluster(directory) as cluster:
        ledger = open_etcd(cluster.url, "my-run")

Members are real processes with data on disk. A member that was killed and is restarted has its data. The plan of the
cluster stands in `cluster.json` of its directory, so that the same one comes up again, on the same ports.

On real hosts etcd is better run by whatever runs the other servers there; see docs/reference/ledger.md.
"""

from __future__ import annotations

import json
import random
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from holdfast.agent.hosts.etcd_member import EtcdMember, MemberPlan, Tls, control_url, end_all, find_etcd
from holdfast.core.errors import ConfigError, LedgerUnavailable
from holdfast.placement.directory import replace_file
from holdfast.placement.proc import process_started

__all__ = ["EtcdCluster", "Tls", "find_etcd"]

RECORD = "cluster.json"
MEMBERS_MAX = 9
START_S = 30.0
CLIENT_PORT, PEER_PORT = 2379, 2380
_PORTS = range(20_000, 32_000)  # below those that the kernel gives to outgoing connections: free stays free
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_KEPT_REVISIONS = 100_000
_PLACE = ("name", "host", "client_port", "peer_port")
_ROW = {*_PLACE, "prefix_command", "pid", "started"}
_PATIENCE_S = 1.0


class EtcdCluster:
    """Members are named by their index from 0. One thread at a time."""

    def __init__(
        self,
        directory: Path,
        members: int = 3,
        *,
        heartbeat_ms: int = 50,
        election_ms: int = 500,
        addresses: Sequence[str] = (),
        prefix_commands: Sequence[Sequence[str]] = (),
        tls: Tls | None = None,
        tied: bool = True,
        options: Sequence[str] = (),
    ) -> None:
        """`addresses`: one for each member, where it listens on etcd's usual ports; by default all are on loopback
        ports that are free. `prefix_commands`: one for each member, what to start it through. `options`: more
        arguments for etcd. With `tied` the members die with this process, however that ends."""
        if not 1 <= members <= MEMBERS_MAX:
            raise ConfigError(
                f"a cluster of {members} members is asked for", hint=f"from 1 to {MEMBERS_MAX}; 3 survive the loss of 1"
            )
        assert len(addresses) in (0, members) and len(prefix_commands) in (0, members)
        self.directory = directory.resolve()
        self._tls = tls
        self._tied = tied
        self._timing = (heartbeat_ms, election_ms)
        self._options = tuple(options)
        plans = _recorded_plans(self.directory)
        if plans is None:
            plans = _plan(members, addresses, prefix_commands)
        elif len(plans) != members:
            raise ConfigError(
                f"the cluster in {self.directory} has {len(plans)} members, not {members}",
                hint="leave the number out, or choose another --dir",
            )
        self.members = [EtcdMember(plan, self.directory / plan.name) for plan in plans]

    # -- all of it

    @property
    def url(self) -> str:
        """What `--ledger` takes."""
        scheme = "etcds" if self._tls else "etcd"
        return f"{scheme}://" + ",".join(self.address(index) for index in range(len(self.members)))

    def address(self, member: int) -> str:
        plan = self.members[member].plan
        return f"{_bracketed(plan.host)}:{plan.client_port}"

    def start(self, *, wait_s: float = START_S) -> None:
        """Start whoever does not run, and wait until all of them serve."""
        find_etcd()
        try:
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            for index, member in enumerate(self.members):
                if not member.alive:
                    member.start(self._arguments(index), tied=self._tied)
            self._record()
        except OSError as error:
            self.stop(patience_s=0.0)
            raise ConfigError(
                f"cannot start etcd in {self.directory}: {error.strerror or error}",
                hint="choose another place with --dir",
            ) from error
        try:
            self.wait_serving(wait_s=wait_s)
        except BaseException:
            self.stop()
            raise

    def stop(self, *, patience_s: float = _PATIENCE_S) -> None:
        """End all members. Their data stays."""
        end_all(self.members, patience_s)

    def __enter__(self) -> EtcdCluster:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(patience_s=0.0)

    def wait_serving(self, members: Sequence[int] | None = None, *, wait_s: float = START_S) -> None:
        """Wait until these members (default: all) serve with a majority behind them."""
        deadline = time.monotonic() + wait_s
        for index in range(len(self.members)) if members is None else members:
            member = self.members[index]
            while not member.serves():
                if not member.alive:
                    raise LedgerUnavailable(f"etcd member {member.plan.name} ended: {member.last_words()}")
                if time.monotonic() >= deadline:
                    raise LedgerUnavailable(
                        f"etcd member {member.plan.name} does not serve after {wait_s:g} s: {member.last_words()}"
                    )
                time.sleep(0.02)

    # -- one member

    def kill(self, member: int) -> None:
        """SIGKILL. Its data stays."""
        self.members[member].kill()

    def restart(self, member: int, *, wait_s: float = START_S) -> None:
        """Start a member that was killed, with its data; wait until it serves unless `wait_s` is 0."""
        self.members[member].start(self._arguments(member), tied=self._tied)
        self._record()
        if wait_s:
            self.wait_serving([member], wait_s=wait_s)

    # -- inside

    def _arguments(self, index: int) -> list[str]:
        plan = self.members[index].plan
        scheme = "https" if self._tls else "http"
        host = _bracketed(plan.host)
        client, peer = f"{scheme}://{host}:{plan.client_port}", f"{scheme}://{host}:{plan.peer_port}"
        everyone = (member.plan for member in self.members)
        heartbeat_ms, election_ms = self._timing
        values = {
            "name": plan.name,
            "data-dir": "data",
            "listen-client-urls": f"{client},{control_url()}",
            "advertise-client-urls": client,
            "listen-peer-urls": peer,
            "initial-advertise-peer-urls": peer,
            "initial-cluster": ",".join(f"{p.name}={scheme}://{_bracketed(p.host)}:{p.peer_port}" for p in everyone),
            "initial-cluster-token": self.directory.name,
            "heartbeat-interval": heartbeat_ms,
            "election-timeout": election_ms,
            "auto-compaction-mode": "revision",
            "auto-compaction-retention": _KEPT_REVISIONS,
            "logger": "zap",
        }
        if self._tls:
            for prefix in ("", "peer-"):
                values[f"{prefix}cert-file"] = str(self._tls.cert)
                values[f"{prefix}key-file"] = str(self._tls.key)
                values[f"{prefix}trusted-ca-file"] = str(self._tls.ca)
                values[f"{prefix}client-cert-auth"] = "true"
        return [f"--{name}={value}" for name, value in values.items()] + list(self._options)

    def _record(self) -> None:
        rows = [
            {**asdict(member.plan), "pid": member.pid, "started": process_started(member.pid) if member.pid else 0}
            for member in self.members
        ]
        replace_file(self.directory / RECORD, json.dumps({"url": self.url, "members": rows}, indent=1) + "\n")


def read_record(directory: Path) -> dict[str, Any] | None:
    """cluster.json of a cluster's directory: its url and its members; None if there is none. Raises ConfigError."""
    path = directory / RECORD
    try:
        value = json.loads(path.read_text())
        if isinstance(value["url"], str) and all(row.keys() >= _ROW for row in value["members"]) and value["members"]:
            return dict(value)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        pass
    raise ConfigError(
        f"{path} cannot be read or is damaged", hint="choose another --dir, or delete the whole directory"
    )


def adopt(directory: Path) -> EtcdCluster | None:
    """The cluster that an earlier command started there, with those of its members that live."""
    record = read_record(directory)
    if record is None:
        return None
    cluster = EtcdCluster(directory, len(record["members"]), tied=False)
    for member, row in zip(cluster.members, record["members"], strict=True):
        if row["pid"] and row["started"]:
            member.adopt(row["pid"], row["started"])
    return cluster


def _recorded_plans(directory: Path) -> list[MemberPlan] | None:
    record = read_record(directory)
    if record is None:
        return None
    return [
        MemberPlan(**{name: row[name] for name in _PLACE}, prefix_command=tuple(row["prefix_command"]))
        for row in record["members"]
    ]


def _plan(count: int, addresses: Sequence[str], prefixes: Sequence[Sequence[str]]) -> list[MemberPlan]:
    taken: set[int] = set()
    plans = []
    for index in range(count):
        host = addresses[index] if addresses else "127.0.0.1"
        on_loopback = host in _LOOPBACK and not prefixes
        plans.append(
            MemberPlan(
                name=f"e{index + 1}",
                host=host,
                client_port=free_port(host, taken) if on_loopback else CLIENT_PORT,
                peer_port=free_port(host, taken) if on_loopback else PEER_PORT,
                prefix_command=tuple(prefixes[index]) if prefixes else (),
            )
        )
    return plans


def free_port(host: str, taken: set[int]) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for _ in range(1000):
        port = random.choice(_PORTS)
        if port in taken:
            continue
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
        taken.add(port)
        return port
    raise ConfigError(f"no port of {host} from {_PORTS[0]} to {_PORTS[-1]} is free", hint="end what uses them")


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
