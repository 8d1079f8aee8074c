"""etcd on the first nodes of a Slurm job, for as long as the job's agents live: `--ledger slurm`.

    HOME/slurm/JOB.STEP.RESTARTS/    on the file system that the nodes share, mode 0700
      member-0.json …                 where a node will serve: its address, two ports that are free there
      ca.pem, certificate.pem, …      with which members and agents prove themselves to each other
      cluster.json                    the first node has seen all members, and made the certificates
      ready.json                      the ledger serves, and knows what it has to know (ledger_copy.py)

Three members where the job has three nodes: any one node may be lost. Fewer nodes have one member, on the first;
without that node the membership cannot change any more. A member's data is in the node's temporary directory: the
ledger of a job that runs again begins with what ledger_copy.py has kept, and the run goes on from its newest
checkpoint.

Slurm's notice goes to every process of a step, and etcd ends at SIGTERM. The workers need it then to leave, so a member
that has ended is started again, on its data, until the agent is done.

Owns the member's process and the directory above. Threads: main, and `holdfast-first-nodes`, which alone touches the
member between `start` and `close`.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from holdfast.agent.hosts.etcd_cluster import RECORD, EtcdCluster, free_port
from holdfast.agent.hosts.etcd_member import EtcdMember, Tls, find_etcd
from holdfast.core.errors import ConfigError, HoldfastError, LedgerError
from holdfast.core.words import KEY_HOSTS
from holdfast.integrations.slurm.ledger_copy import LedgerCopy
from holdfast.integrations.slurm.step import SlurmStep
from holdfast.ledger.port import Ledger
from holdfast.net.addresses import address_towards
from holdfast.placement.directory import replace_file
from holdfast.trust.keys import AUTHORITY, CERTIFICATE, PRIVATE_KEY

MEET_S = 120.0  # nodes of a job start within seconds of each other, or not at all
LEAVE_S = 60.0  # for the other agents, who need the ledger until they have ended
START_S = 120.0
LAST_COPY_S = 20.0
_LOOK_S = 0.1
_KEEP_S = 0.2


class FirstNodes:
    """This node's part in the job's ledger. `url` is for every agent of the step."""

    def __init__(self, step: SlurmStep, home: Path, run: str) -> None:
        self.step = step
        self.run = run
        self.url = ""
        self.place = home / "slurm" / step.mark
        self._member: EtcdCluster | None = None
        self._data: Path | None = None
        self._copy: LedgerCopy | None = None
        self._closing = threading.Event()
        self._serves = threading.Event()
        self._keeping: threading.Thread | None = None

    def start(self, variables: MutableMapping[str, str]) -> None:
        """Come back when the ledger serves. Credentials for it are put into `variables`, for agent and workers."""
        try:
            self.place.mkdir(parents=True, exist_ok=True, mode=0o700)
            if self.step.serves:
                self._offer()
            if self.step.node == 0:
                self._make_cluster()
            cluster = self._wait_for("cluster.json", "the first node of the job")
        except OSError as error:
            raise ConfigError(
                f"the nodes of job {self.step.job} cannot meet in {self.place}: {error.strerror or error}",
                hint="name a directory that all nodes share, with --dir DIR or $HOLDFAST_DIR",
            ) from error
        self.url = str(cluster["url"])
        tls = Tls(ca=self.place / AUTHORITY, cert=self.place / CERTIFICATE, key=self.place / PRIVATE_KEY)
        # What someone else has set for an etcd of theirs is not for this one.
        variables.update(
            HOLDFAST_LEDGER_CA=str(tls.ca), HOLDFAST_LEDGER_CERT=str(tls.cert), HOLDFAST_LEDGER_KEY=str(tls.key)
        )
        for name in ("HOLDFAST_LEDGER_USER", "HOLDFAST_LEDGER_PASSWORD", "HOLDFAST_LEDGER_PASSWORD_FILE"):
            variables.pop(name, None)
        if self.step.serves:
            self._serve(cluster, tls)
        if self.step.node == 0:
            self._fill()
        self._wait_for("ready.json", "the ledger on the first node")

    def close(self) -> None:
        """When this node's agent has ended: the ledger stays for the agents of other nodes, for a while."""
        try:
            if self._member is not None:
                self._wait_for_others()
        finally:
            self._closing.set()
            if self._keeping is not None:
                self._keeping.join()  # the member dies with it
            if self._copy is not None:
                self._copy.close()
            if self._member is not None:
                self._member.stop()
            if self._data is not None:
                shutil.rmtree(self._data, ignore_errors=True)
            if self.step.node == 0:
                shutil.rmtree(self.place, ignore_errors=True)

    # -- meeting

    def _offer(self) -> None:
        find_etcd()
        host, taken = address_towards(f"etcd://{self.step.launched_from or 'localhost'}:2379"), set[int]()
        offer = {"host": host, "client_port": free_port(host, taken), "peer_port": free_port(host, taken)}
        replace_file(self.place / f"member-{self.step.node}.json", json.dumps(offer))

    def _make_cluster(self) -> None:
        offers = [
            self._wait_for(f"member-{number}.json", f"node {number} of the job") for number in range(self.step.members)
        ]
        rows = [
            {**offer, "name": f"e{number + 1}", "prefix_command": [], "pid": 0, "started": 0}
            for number, offer in enumerate(offers)
        ]
        issued = _issued([str(row["host"]) for row in rows])
        for name, content in ((AUTHORITY, issued[0]), (CERTIFICATE, issued[1]), (PRIVATE_KEY, issued[2])):
            path = self.place / name
            path.touch(mode=0o600)
            path.write_bytes(content)
        url = "etcds://" + ",".join(f"{_bracketed(row['host'])}:{row['client_port']}" for row in rows)
        replace_file(self.place / "cluster.json", json.dumps({"url": url, "members": rows}))

    def _wait_for(self, name: str, who: str) -> dict[str, Any]:
        deadline = time.monotonic() + MEET_S
        while True:
            with suppress(FileNotFoundError, ValueError):
                found = json.loads((self.place / name).read_text())
                if isinstance(found, dict):
                    return found
            if time.monotonic() > deadline:
                raise ConfigError(
                    f"waited {MEET_S:g} s for {who} in {self.place}",
                    hint="all nodes must share that directory: --dir DIR or $HOLDFAST_DIR; and etcd must be on the "
                    "first nodes, or give --ledger etcd://…",
                )
            time.sleep(_LOOK_S)

    # -- serving

    def _serve(self, cluster: dict[str, Any], tls: Tls) -> None:
        self._data = Path(tempfile.mkdtemp(prefix="holdfast-ledger-"))
        directory = self._data / f"slurm-{self.step.mark}"  # its name is the cluster's token: the same on every node
        directory.mkdir(mode=0o700)
        replace_file(directory / RECORD, json.dumps(cluster))
        self._member = EtcdCluster(directory, self.step.members, tls=tls)
        self._keeping = threading.Thread(target=self._keep, args=(self._member,), name="holdfast-first-nodes")
        self._keeping.start()
        if not self._serves.wait(START_S):
            raise ConfigError(
                f"the job's ledger does not serve on this node after {START_S:g} s",
                hint="is the first node reached by the others? Or give --ledger etcd://… of an etcd outside the job",
            )

    def _keep(self, cluster: EtcdCluster) -> None:
        """Until the agent is done, and the copy has what the ledger says then. The member does not outlive this."""
        member = cluster.members[self.step.node]
        while not self._closing.is_set():
            self._look_after(cluster, member)
            if self._copy is not None:
                self._copy.keep()
            self._closing.wait(_KEEP_S)
        deadline = time.monotonic() + LAST_COPY_S
        while self._copy is not None and not self._copy.keep(at_once=True):
            if time.monotonic() > deadline:
                print("holdfast: the last changes of the job's ledger could not be copied", file=sys.stderr, flush=True)
                return
            self._look_after(cluster, member)
            time.sleep(_LOOK_S)

    def _look_after(self, cluster: EtcdCluster, member: EtcdMember) -> None:
        try:
            if not member.alive:
                cluster.restart(self.step.node, wait_s=0)
            elif not self._serves.is_set() and member.serves():
                self._serves.set()
        except (HoldfastError, OSError) as error:
            print(f"holdfast: the job's ledger cannot be started here: {error}", file=sys.stderr, flush=True)

    def _fill(self) -> None:
        copy = LedgerCopy(self.place.with_name(f"{self.run}.ledger.json"), self._open())
        deadline = time.monotonic() + START_S
        while True:
            try:
                copy.restore()
                copy.name_run()
                break
            except LedgerError as error:  # with several members, until the others are there
                if time.monotonic() > deadline:
                    raise ConfigError(
                        f"the job's ledger does not answer: {error.message}",
                        hint="do its first nodes reach each other?",
                    ) from error
                time.sleep(_LOOK_S)
        self._copy = copy  # from here on it is the thread's
        replace_file(self.place / "ready.json", "{}")

    def _open(self) -> Ledger:
        from holdfast.ledger.etcd import open_etcd  # loads grpc

        return open_etcd(self.url, self.run)

    def _wait_for_others(self) -> None:
        """Until no agent of another host is there any more, by the ledger."""
        ledger, deadline = self._open(), time.monotonic() + LEAVE_S
        try:
            while time.monotonic() < deadline:
                with suppress(LedgerError):
                    if not ledger.read(KEY_HOSTS).entries:
                        return
                time.sleep(_LOOK_S)
        finally:
            ledger.close()


def _issued(hosts: list[str]) -> tuple[bytes, bytes, bytes]:
    try:
        from holdfast.trust.issuing import issue
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"making certificates needs the package {error.name}", hint="pip install 'holdfast[hosts]'"
        ) from error
    issued = issue(addresses=hosts)
    return issued.authority, issued.certificate, issued.private_key


def _bracketed(host: object) -> str:
    return f"[{host}]" if ":" in str(host) else str(host)
