"""Where a worker belongs: its run's ledger, its id, its listener; and what is built there."""

from __future__ import annotations

import os
import socket
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from holdfast.checkpoint.host_memory import HostMemory
from holdfast.checkpoint.memory_place import memory_directory
from holdfast.checkpoint.settings import CheckpointSettings, parse_memory
from holdfast.core.config import CHANGEABLE, ELASTIC, RunConfig
from holdfast.core.errors import ConfigError, LedgerUnavailable, NumericsError
from holdfast.core.rewinds import Rewinds
from holdfast.core.words import (
    KEY_CONFIG,
    KEY_NUMERICS,
    KEY_REWINDS,
    KEY_SIZE,
    KEY_WORKERS,
    Registration,
    decode_json,
    encode_json,
)
from holdfast.events import EventLog
from holdfast.launch.environment import PATHS, WorkerEnvironment
from holdfast.launch.ledgers import open_ledger
from holdfast.launch.proc import process_started
from holdfast.ledger.memory import MemoryLedger
from holdfast.ledger.port import Ledger
from holdfast.membership.machine import Machine
from holdfast.membership.view_rules import Timing
from holdfast.modes.exact import Exact
from holdfast.reduce.arena import Arena
from holdfast.reduce.paths import takes_two_rounds
from holdfast.reduce.reduction import SMALL_BYTES
from holdfast.reduce.sums import Sums
from holdfast.run.auditing import Audits, audit_rules
from holdfast.run.catching import Catching, MeanDesk, serve_mean
from holdfast.run.checkpointing import Checkpoints, NoCheckpoints
from holdfast.run.gradients import Gradients
from holdfast.run.ledger_feed import LedgerFeed
from holdfast.run.listener import Listener
from holdfast.run.mailbox import Mailbox
from holdfast.run.meeting import Connected
from holdfast.run.memory_desk import serve_memory
from holdfast.run.numerics import check_fingerprint
from holdfast.run.quorum import QuorumWorker, check_size
from holdfast.run.recalling import Recaller
from holdfast.run.rewinding import Rewinding
from holdfast.run.snapshot_desk import SnapshotDesk
from holdfast.run.sockets import listens_everywhere, open_tcp, open_unix
from holdfast.run.worker import Worker
from holdfast.state.snapshot import Holder
from holdfast.state.transfer import serve
from holdfast.trust.keys import Keys, load_keys

LEDGER_WAIT_S = 60.0
ALONE_LEASE_S = 3600.0
SNAPSHOT_WAIT_S = 30.0
ABANDON_MARGIN_S = 60.0
STATES, FETCHED_BYTES_PER_S = 3, 500e6  # a state has so many times the bytes of a gradient, and comes as fast


def path_of(environment: WorkerEnvironment | None) -> str:
    """How gradients travel. On one host, who listens on TCP does not share memory unless told to."""
    if environment is None:
        return "host"
    if environment.path == "network" or (environment.path == "auto" and environment.listen and not environment.host):
        return "network"
    return "hosts" if environment.host else "host"


def _timing(config: RunConfig, late_s: float) -> Timing:
    """Who may still train without the ledger is not given up: see docs/decisions/0006."""
    timing = Timing(late_s=late_s)
    return replace(timing, abandon_s=config.outage_s + ABANDON_MARGIN_S) if config.outage_s else timing


def _late_s(environment: WorkerEnvironment | None, slot_bytes: int) -> float:
    """Who is left behind fetches the state when it is back, and the others wait for that: so at least as long."""
    least_s = environment.late_after_s if environment is not None else 0.0
    return max(least_s, STATES * slot_bytes / FETCHED_BYTES_PER_S) if least_s else 0.0


def _kind(config: RunConfig) -> Callable[..., Worker]:
    return partial(QuorumWorker, quorum=config.quorum) if config.quorum else Worker


class Place:
    """Where this process belongs: its run's ledger, its id, its listener."""

    def __init__(self, environment: WorkerEnvironment | None, mark: str) -> None:
        self.environment = environment
        self.fingerprint = mark
        self.rewinds = Rewinds()
        self.mailbox = Mailbox()
        self.listener: Listener | None = None
        self.host = (environment.host if environment else "") or socket.gethostname()
        self.ledger: Ledger
        if environment is None:
            self.me = "w0.1"
            self.keys = Keys.from_secret(os.urandom(32))
            self.lease_s = ALONE_LEASE_S
            self.ledger = MemoryLedger()
            self.events = EventLog(None, self.me)
            return
        if environment.path not in PATHS:
            raise ConfigError(f"the path is {environment.path!r}", hint=f"--path is one of {', '.join(PATHS)}")
        self.me = environment.worker
        self.keys = load_keys(environment.keys) if environment.keys else Keys.from_secret(environment.secret())
        self.lease_s = environment.lease_s
        self.ledger = open_ledger(environment.ledger, environment.run, environment.ledger_socket, self.keys.secret)
        self.events = EventLog(environment.run_dir / "events" / f"{self.me}.jsonl", self.me)

    @property
    def network(self) -> bool:
        return path_of(self.environment) == "network"

    def agree(self, config: RunConfig, numerics: str) -> None:
        """Be of one mind with the run on what decides its bits; the first worker sets it."""
        deadline = time.monotonic() + LEDGER_WAIT_S
        if self.environment is None:
            self.ledger.put(KEY_SIZE, encode_json({"workers": 1}))
        told = False
        while True:
            try:
                self._agree(config, numerics)
                break
            except LedgerUnavailable as error:
                # etcd comes back; an agent that is gone with its ledger may not, and nobody else would end us then.
                if time.monotonic() > deadline and not (self.environment and self.environment.ledger):
                    raise
                if not told:
                    self.events.write("ledger_down", reason=error.message)
                    told = True
        if told:
            self.events.write("ledger_up")
        if config.quorum and self.environment is not None and not self.environment.host:
            check_size(config.quorum, self.ledger)

    def _agree(self, config: RunConfig, numerics: str) -> None:
        if self.ledger.compare_and_set(KEY_CONFIG, config.encode(), expected=0) is None:
            entry = self.ledger.get(KEY_CONFIG)
            if entry is not None and not config.check_same(entry.value, may_differ=CHANGEABLE):
                if self.ledger.read(KEY_WORKERS).entries:
                    config.check_same(entry.value)
                elif self.ledger.compare_and_set(KEY_CONFIG, config.encode(), expected=entry.revision) is None:
                    self._agree(config, numerics)
                    return
        record = self.ledger.get(KEY_REWINDS)  # before this worker registers: see rewinding.py
        self.rewinds = Rewinds.decode(record.value) if record is not None else Rewinds()
        mark = encode_json({"fingerprint": self.fingerprint, "worker": self.me, "torch": torch.__version__})
        if self.ledger.compare_and_set(KEY_NUMERICS, mark, expected=0) is None:
            entry = self.ledger.get(KEY_NUMERICS)
            if entry is not None:
                self._compare(entry.value, numerics)

    def _compare(self, value: bytes, numerics: str) -> None:
        theirs = decode_json(value)
        try:
            other = f"{theirs.get('worker')} (torch {theirs.get('torch')})"
            check_fingerprint(self.fingerprint, str(theirs.get("fingerprint")), other)
        except NumericsError as error:
            if numerics == "refuse":
                raise
            self.events.write("warning", text=error.message)
            warnings.warn(str(error), stacklevel=4)

    def build(
        self, config: RunConfig, exact: Exact, holder: Holder, saving: CheckpointSettings
    ) -> tuple[Worker, LedgerFeed]:
        layout = exact.whole_layout()
        small = layout.slot_bytes <= SMALL_BYTES
        two_rounds = takes_two_rounds(config.path, small=small)
        parities = 2 if config.path == "host" and small else 1
        arena = Arena.create(config.shards * parities, layout.slot_bytes)
        desk, means = SnapshotDesk(), MeanDesk()
        address, local = self._listen(arena, desk, means)
        registration = Registration(
            id=self.me,
            host=self.host,
            pid=os.getpid(),
            pid_started=process_started(os.getpid()) or 0,
            address=address,
            fingerprint=self.fingerprint,
            local=local,
        )
        feed = LedgerFeed(self.ledger, registration, self.mailbox, self.events, lease_s=self.lease_s)
        rewinding = Rewinding(self.rewinds, feed, self.events, alone=self.environment is None)
        checkpoints = self._checkpoints(config, holder, saving, feed, rewinding)
        machine = self._machine(
            config, exact, holder, two_rounds=two_rounds, saves=isinstance(checkpoints, Checkpoints)
        )
        sums = Sums(arena, config.shards, parities=parities)
        gradients = Gradients(
            self.me, shards=config.shards, arena=arena, sums=sums, exact=exact, kind=config.path, small=small
        )
        worker = _kind(config)(
            machine,
            keys=self.keys,
            host=self.host,
            mailbox=self.mailbox,
            feed=feed,
            arena=arena,
            gradients=gradients,
            exact=exact,
            holder=holder,
            desk=desk,
            catching=self._catching(means, gradients, exact, checkpoints),
            events=self.events,
            outage_s=config.outage_s,
            checkpoints=checkpoints,
            rewinding=rewinding,
            audits=Audits(
                machine.audits,
                me=self.me,
                holder=holder,
                events=self.events,
                feed=feed,
                doubts=config.non_finite != "ignore",
            ),
        )
        worker.gradients.passed, worker.gradients.elastic = rewinding.passed, machine.elastic
        feed.start()
        return worker, feed

    def _catching(self, means: MeanDesk, gradients: Gradients, exact: Exact, checkpoints: NoCheckpoints) -> Catching:
        return Catching(
            self.me,
            self.host,
            self.keys,
            desk=means,
            gradients=gradients,
            exact=exact,
            events=self.events,
            checkpoints=checkpoints,
        )

    def _machine(self, config: RunConfig, exact: Exact, holder: Holder, *, two_rounds: bool, saves: bool) -> Machine:
        # An elastic step need not be whole: whoever does not want to wait for the late ones asks for a quorum.
        late_s = _late_s(self.environment, exact.whole_layout().slot_bytes) if config.mode != ELASTIC else 0.0
        return Machine(
            self.me,
            shards=config.shards,
            digest=holder.capture(0).digest(),
            two_rounds=two_rounds,
            checkpoints=saves,
            timing=_timing(config, late_s),
            rules=audit_rules(config, exact.parameters),
            elastic=config.mode == ELASTIC,
            even=config.quorum > 0,
        )

    def _memory_root(self) -> Path | None:
        environment = self.environment
        return memory_directory(environment.run_dir, self.keys.secret) if environment is not None else None

    def _checkpoints(
        self, config: RunConfig, holder: Holder, saving: CheckpointSettings, feed: LedgerFeed, rewinding: Rewinding
    ) -> NoCheckpoints:
        """In storage, in hosts' memory, or both. A run of one keeps nothing in memory: it has no host to itself."""
        environment, root = self.environment, self._memory_root()
        memory, recaller = None, None
        if saving.memory and environment is not None and root is not None:
            memory = HostMemory(
                root,
                parse_memory(saving.memory),
                run_directory=environment.run_dir,
                warn=lambda text: self.events.write("warning", text=text),
            )
            rewinding.forget_memory(root)
            recaller = Recaller(root, me=self.me, host=self.host, keys=self.keys, who=feed.who)
        if not saving.uri and memory is None:
            return NoCheckpoints()
        return Checkpoints(
            saving,
            config,
            holder,
            me=self.me,
            run=environment.run if environment else "",
            feed=feed,
            events=self.events,
            rewinding=rewinding,
            run_dir=environment.run_dir if environment else None,
            memory=memory,
            recaller=recaller,
        )

    def _open(self) -> tuple[list[socket.socket], str, str]:
        """The sockets that we listen on, the address for workers of other hosts, and the one for those of this."""
        environment = self.environment
        assert environment is not None
        path, listen = self._socket_path(environment), environment.listen
        if not environment.host and not listen and not self.network:
            server, address = open_unix(path)
            return [server], address, ""
        if environment.host and not environment.advertise and listens_everywhere(listen):
            raise ConfigError(
                f"--listen {listen} is no address that other hosts can dial", hint="add --advertise with one that is"
            )
        server, address = open_tcp(listen or "127.0.0.1", environment.advertise)
        if not environment.host:
            return [server], address, ""
        near, local = open_unix(path)
        return [server, near], address, local

    def _socket_path(self, environment: WorkerEnvironment) -> Path:
        """Without the host's name, which the directory's owner knows: such a path has 107 bytes at most."""
        return environment.socket_dir / f"{self.me.partition('@')[0]}.sock"

    def _listen(self, arena: Arena, desk: SnapshotDesk, means: MeanDesk) -> tuple[str, str]:
        if self.environment is None:
            return "none:", ""
        servers, address, local = self._open()
        root = self._memory_root()

        def on_snapshot(view: int, sock: socket.socket) -> None:
            snapshot = desk.wait_for(view, SNAPSHOT_WAIT_S)
            if snapshot is not None:
                serve(sock, snapshot)

        self.listener = Listener(
            servers,
            self.keys,
            self.me,
            arena=arena,
            on_group=lambda view, connection: self.mailbox.put(Connected(view, connection)),
            on_snapshot=on_snapshot,
            on_memory=lambda sock: serve_memory(sock, root) if root is not None else None,
            on_mean=lambda step, sock: serve_mean(sock, means, step),
        )
        return address, local

    def close(self) -> None:
        if self.listener is not None:
            self.listener.close()
        if self.environment is not None:
            self._socket_path(self.environment).unlink(missing_ok=True)
