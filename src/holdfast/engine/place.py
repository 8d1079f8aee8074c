"""Where a worker belongs: its run's ledger, its id, its listener, its place for checkpoints. building.py builds it."""

from __future__ import annotations

import os
import secrets
import socket
import time
import warnings
from pathlib import Path

import torch

from holdfast.checkpoint.format.owner import Owner
from holdfast.checkpoint.host_memory.place import memory_directory
from holdfast.checkpoint.host_memory.snapshot_files import HostMemory
from holdfast.checkpoint.settings import CheckpointSettings, parse_memory
from holdfast.core.config import CHANGEABLE, PROCESS_GROUP, RunConfig
from holdfast.core.errors import LedgerUnavailable, NumericsError
from holdfast.core.options.declaring import option_of
from holdfast.core.options.run import REFUSE
from holdfast.core.rewinds import Rewinds
from holdfast.core.words import (
    KEY_CONFIG,
    KEY_NUMERICS,
    KEY_REWINDS,
    KEY_RUN,
    KEY_SIZE,
    KEY_WORKERS,
    decode_json,
    decode_whole,
    encode_json,
)
from holdfast.engine.api.alone import SpokenEvents
from holdfast.engine.ledger_feed import LedgerFeed
from holdfast.engine.numerics import check_fingerprint
from holdfast.engine.ranks.forming import socket_of_rank
from holdfast.engine.recovery.catching import MEAN, MeanDesk, serve_mean
from holdfast.engine.recovery.rewinding import Rewinding
from holdfast.engine.servers import reach_servers
from holdfast.engine.transfer.checkpointing import NoCheckpoints, RunCheckpoints, SavingWorker
from holdfast.engine.transfer.claiming import Claim
from holdfast.engine.transfer.fetching import SNAPSHOT
from holdfast.engine.transfer.memory_desk import MEMORY, serve_memory
from holdfast.engine.transfer.recalling import Recaller
from holdfast.engine.transfer.snapshot_desk import SnapshotDesk
from holdfast.events import EventLog
from holdfast.ledger.memory import MemoryLedger
from holdfast.ledger.port import Ledger
from holdfast.modes.port import Mode
from holdfast.net.listener import HandedOver, Listener, Purposes, Served
from holdfast.net.mailbox import Mailbox
from holdfast.net.meeting import GROUP, Connected
from holdfast.net.sockets import open_unix
from holdfast.net.wires import SocketWires, Wires
from holdfast.placement.environment import WorkerEnvironment
from holdfast.placement.ledger import open_workers_ledger
from holdfast.placement.listening import open_sockets, socket_path
from holdfast.placement.proc import started_here
from holdfast.placement.ranks import Ranks, ranks_here
from holdfast.reduce.arena import Arena
from holdfast.servers.memory import MemoryServers, MemorySlices
from holdfast.servers.run_facts import author_of
from holdfast.servers.units_port import MemoryUnits, ServerLines, SharedTable
from holdfast.state.snapshot import States
from holdfast.state.transfer import serve
from holdfast.trust.keys import Keys, load_keys

LEDGER_WAIT_S = 60.0
ALONE_LEASE_S = 3600.0
SNAPSHOT_WAIT_S = 30.0


def path_of(environment: WorkerEnvironment | None) -> str:
    """How gradients travel. On one host, who listens on TCP does not share memory unless told to."""
    if environment is None:
        return "host"
    if environment.path == PROCESS_GROUP:
        return PROCESS_GROUP
    if environment.path == "network" or (environment.path == "auto" and environment.listen and not environment.host):
        return "network"
    return "hosts" if environment.host else "host"


class WorkerPlace:
    """Where this process belongs: its run's ledger, its id, its listener."""

    ranks = Ranks()  # of the group that this worker is

    def __init__(self, environment: WorkerEnvironment | None, mark: str, mode: Mode) -> None:
        self.environment = environment
        self.mode = mode
        self.fingerprint = mark
        self.rewinds = Rewinds()
        self.run_id = secrets.token_hex(16)
        self.mailbox = Mailbox()
        self.listener: Listener | None = None
        self.host = (environment.host if environment else "") or socket.gethostname()
        self.ledger: Ledger
        self.events: EventLog
        self.ranks = ranks_here() if environment is not None else Ranks()
        if environment is None:
            self.me = "w0.1"
            self.keys = Keys.from_secret(os.urandom(32))
            self.wires: Wires = SocketWires(self.host, self.keys)
            self.lease_s = ALONE_LEASE_S
            self.ledger = MemoryLedger()
            self.events = SpokenEvents()
            return
        option_of(environment, "path").check(environment.path)
        self.me = environment.worker
        self.keys = load_keys(environment.keys) if environment.keys else Keys.from_secret(environment.secret())
        self.wires = SocketWires(self.host, self.keys)
        self.lease_s = environment.lease_s
        if self.ranks.rank:  # the first rank speaks for all, to the ledger and in the log
            self.ledger, self.events = MemoryLedger(), EventLog(None, self.me)
            return
        self.ledger = open_workers_ledger(environment, self.keys)
        self.events = EventLog(environment.run_dir / "events" / f"{self.me}.jsonl", self.me)

    def reach_servers(self) -> ServerLines:
        """A new connection to the run's parameter servers; a run of one has them in its own process."""
        if self.environment is None:
            name, incarnation = author_of(self.me)
            parameters = MemoryServers(MemorySlices(), name, incarnation)
            return ServerLines(parameters, MemoryUnits(SharedTable(), name, incarnation))
        return reach_servers(self.environment, self.me, self.host, self.keys)

    @property
    def run(self) -> str:
        return self.environment.run if self.environment is not None else ""

    @property
    def network(self) -> bool:
        return path_of(self.environment) == "network"

    def agree(self, config: RunConfig) -> None:
        """Be of one mind with the run on what decides its bits; the first worker sets it."""
        kernel = self.wires.kernel
        deadline = kernel.now() + LEDGER_WAIT_S
        if self.environment is None:
            self.ledger.put(KEY_SIZE, encode_json({"workers": 1}))
        told = False
        while True:
            try:
                self._agree(config)
                break
            except LedgerUnavailable as error:
                # etcd comes back; an agent that is gone with its ledger may not, and nobody else would end us then.
                if kernel.now() > deadline and not (self.environment and self.environment.ledger):
                    raise
                if not told:
                    self.events.write("ledger_down", reason=error.message)
                    told = True
        if told:
            self.events.write("ledger_up")
        if self.environment is not None and not self.environment.host:  # of several hosts, not all may be there yet
            sizes = [decode_whole(entry.value, "workers") or 0 for entry in self.ledger.read(KEY_SIZE).entries]
            self.mode.check_size(sum(sizes), config.shards) if any(sizes) else None

    def _agree(self, config: RunConfig) -> None:
        if self.ledger.compare_and_set(KEY_CONFIG, config.encode(), expected=0) is None:
            entry = self.ledger.get(KEY_CONFIG)
            if entry is not None and not config.check_same(entry.value, may_differ=CHANGEABLE):
                if self.ledger.read(KEY_WORKERS).entries:
                    config.check_same(entry.value)
                elif self.ledger.compare_and_set(KEY_CONFIG, config.encode(), expected=entry.revision) is None:
                    self._agree(config)
                    return
        if self.ledger.compare_and_set(KEY_RUN, encode_json({"id": self.run_id}), expected=0) is None:
            known = self.ledger.get(KEY_RUN)
            self.run_id = str(decode_json(known.value)["id"]) if known is not None else self.run_id
        record = self.ledger.get(KEY_REWINDS)  # before this worker registers: see rewinding.py
        self.rewinds = Rewinds.decode(record.value) if record is not None else Rewinds()
        mark = encode_json({"fingerprint": self.fingerprint, "worker": self.me, "torch": torch.__version__})
        if self.ledger.compare_and_set(KEY_NUMERICS, mark, expected=0) is None:
            entry = self.ledger.get(KEY_NUMERICS)
            if entry is not None:
                self._compare(entry.value)

    def _compare(self, value: bytes) -> None:
        theirs = decode_json(value)
        try:
            other = f"{theirs.get('worker')} (torch {theirs.get('torch')})"
            check_fingerprint(self.fingerprint, str(theirs.get("fingerprint")), other)
        except NumericsError as error:
            if self.environment is None or self.environment.numerics == REFUSE:
                raise
            self.events.write("warning", text=error.message)
            warnings.warn(str(error), stacklevel=4)

    def memory_root(self) -> Path | None:
        environment = self.environment
        return memory_directory(environment.run_dir, self.keys.secret) if environment is not None else None

    def checkpoints(
        self, config: RunConfig, holder: States, saving: CheckpointSettings, feed: LedgerFeed, rewinding: Rewinding
    ) -> NoCheckpoints:
        """In storage, in hosts' memory, or both. A run of one keeps nothing in memory: it has no host to itself."""
        environment, root = self.environment, self.memory_root()
        memory, recaller = None, None
        if saving.memory and environment is not None and root is not None:
            memory = HostMemory(
                root,
                parse_memory(saving.memory),
                run_directory=environment.run_dir,
                warn=lambda text: self.events.write("warning", text=text),
            )
            rewinding.forget_memory(root)
            recaller = Recaller(root, me=self.me, wires=self.wires, who=feed.who)
        if not saving.uri and memory is None:
            return NoCheckpoints()
        return RunCheckpoints(
            saving,
            config,
            holder,
            SavingWorker(
                id=self.me,
                run=self.run,
                run_dir=environment.run_dir if environment else None,
                memory=memory,
                recaller=recaller,
            ),
            feed=feed,
            events=self.events,
            rewinding=rewinding,
            claim=Claim(self._owner()),
        )

    def saves(self, checkpoints: NoCheckpoints) -> bool:
        """Whether members without state look there for one."""
        return checkpoints.keeps

    def _owner(self) -> Owner:
        """What this run says of itself in its place for checkpoints."""
        environment = self.environment
        about = {"id": self.run_id, "host": socket.gethostname(), "created_s": round(time.time(), 3)}
        if environment is not None:
            return Owner(run=environment.run, directory=str(environment.run_dir), **about)  # type: ignore[arg-type]
        return Owner(run="", pid=os.getpid(), pid_started=started_here(), **about)  # type: ignore[arg-type]

    def listen(self, arena: Arena, desk: SnapshotDesk, means: MeanDesk) -> tuple[str, str]:
        if self.environment is None:
            return "none:", ""
        if self.ranks.rank:
            server, _ = open_unix(self._socket())
            self.listener = Listener([server], self.keys, self.me, self.purposes(desk, means))
            return "none:", ""
        servers, address, local = open_sockets(self.environment, network=self.network)
        self.listener = Listener(servers, self.keys, self.me, self.purposes(desk, means), memory=arena)
        return address, local

    def _socket(self) -> Path:
        assert self.environment is not None
        return Path(socket_of_rank(str(socket_path(self.environment)), self.ranks.rank))

    def purposes(self, desk: SnapshotDesk, means: MeanDesk) -> Purposes:
        """What other workers may connect to this one for."""
        root = self.memory_root()

        def on_snapshot(view: int, sock: socket.socket) -> None:
            snapshot = desk.wait_for(view, SNAPSHOT_WAIT_S)
            if snapshot is not None:
                serve(sock, snapshot, is_offered=lambda: desk.offers(snapshot))

        return {
            GROUP: HandedOver(lambda view, connection: self.mailbox.put(Connected(view, connection))),
            SNAPSHOT: Served(on_snapshot),
            MEAN: Served(lambda step, sock: serve_mean(sock, means, step)),
            MEMORY: Served(lambda _, sock: serve_memory(sock, root) if root is not None else None),
        }

    def close(self) -> None:
        if self.listener is not None:
            self.listener.close()
        if self.environment is not None:
            self._socket().unlink(missing_ok=True)
